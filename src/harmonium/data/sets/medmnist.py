"""MedMNIST v2 (Yang et al., 2023): twelve data sets of medical images in one format.

Each is an archive of images and labels for training, validation and testing. `FACTS` has what
differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets, no_labels
from harmonium.data.decoding.byte_arrays import append, check_labels
from harmonium.data.images import Integers, Pixels
from harmonium.data.published_datasets import Published, Remote, Source
from harmonium.data.sets.npz import open_archive

SIDE = 28

_PARTS = {"train": "train", "validation": "val", "test": "test"}  # and their prefixes
_PLACE = "https://zenodo.org/records/10519652/files/"
_ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
)


class Facts(NamedTuple):
    """The facts about one of the data sets."""

    title: str
    shows: str
    md5: str
    channels: int
    counts: tuple[int, int, int]  # images for training, validation and testing
    classes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()  # instead of classes: each is present or absent in an image
    licence: str = "CC BY 4.0"


FACTS = {
    "pathmnist": Facts(
        *("PathMNIST", "tissue of the colon", "a8b06965200029087d5bd730944a56c1", 3),
        (89_996, 10_004, 7_180),
        (
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
            *("normal colon mucosa", "cancer-associated stroma"),
            "colorectal adenocarcinoma epithelium",
        ),
    ),
    "chestmnist": Facts(
        *("ChestMNIST", "chest X-rays", "02c8a6516a18b556561a56cbdd36c4a8", 1),
        (78_468, 11_219, 22_433),
        findings=(
            *("atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule"),
            *("pneumonia", "pneumothorax", "consolidation", "edema", "emphysema", "fibrosis"),
            *("pleural", "hernia"),
        ),
    ),
    "dermamnist": Facts(
        *("DermaMNIST", "marks on the skin", "0744692d530f8e62ec473284d019b0c7", 3),
        (7_007, 1_003, 2_005),
        (
            "actinic keratoses and intraepithelial carcinoma",
            *("basal cell carcinoma", "benign keratosis-like lesions", "dermatofibroma"),
            *("melanoma", "melanocytic nevi", "vascular lesions"),
        ),
        licence="CC BY-NC 4.0",
    ),
    "octmnist": Facts(
        *("OCTMNIST", "scans of the retina", "c68d92d5b585d8d81f7112f81e2d0842", 1),
        (97_477, 10_832, 1_000),
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": Facts(
        *("PneumoniaMNIST", "children's chest X-rays", "28209eda62fecd6e6a2d98b1501bb15f", 1),
        (4_708, 524, 624),
        ("normal", "pneumonia"),
    ),
    "retinamnist": Facts(
        *("RetinaMNIST", "photographs of the retina", "bd4c0672f1bba3e3a89f0e4e876791e4", 3),
        (1_080, 120, 400),
        ("0", "1", "2", "3", "4"),  # grades of a disease
    ),
    "breastmnist": Facts(
        *("BreastMNIST", "breast ultrasound", "750601b1f35ba3300ea97c75c52ff8f6", 1),
        (546, 78, 156),
        ("malignant", "normal, benign"),
    ),
    "bloodmnist": Facts(
        *("BloodMNIST", "blood cells", "7053d0359d879ad8a5505303e11de1dc", 3),
        (11_959, 1_712, 3_421),
        (
            *("basophil", "eosinophil", "erythroblast", "immature granulocytes"),
            *("lymphocyte", "monocyte", "neutrophil", "platelet"),
        ),
    ),
    "tissuemnist": Facts(
        *("TissueMNIST", "kidney cells", "ebe78ee8b05294063de985d821c1c34b", 1),
        (165_466, 23_640, 47_280),
        (
            *("Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule"),
            *("Glomerular endothelial cells", "Interstitial endothelial cells", "Leukocytes"),
            *("Podocytes", "Proximal Tubule Segments", "Thick Ascending Limb"),
        ),
    ),
    "organamnist": Facts(
        *("OrganAMNIST", "axial CT of organs", "68e3f8846a6bd62f0c9bf841c0d9eacc", 1),
        (34_561, 6_491, 17_778),
        _ORGANS,
    ),
    "organcmnist": Facts(
        *("OrganCMNIST", "coronal CT of organs", "b9ceb9546e10131b32923c5bbeaea2b1", 1),
        (12_975, 2_392, 8_216),
        _ORGANS,
    ),
    "organsmnist": Facts(
        *("OrganSMNIST", "sagittal CT of organs", "9ab87b696fb54e2a387ebe992d6ed5f1", 1),
        (13_932, 2_452, 8_827),
        _ORGANS,
    ),
}


@dataclass(frozen=True)
class MedMnist(Published):
    """One of the data sets; its own validation part replaces the share `validation`."""

    facts: ClassVar[Facts]

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Write the three parts; findings become factors, and the labels are unknown."""
        path = folder / f"{self.name}.npz"
        findings, classes = self.facts.findings, self.facts.classes
        with open_archive(path) as archive:
            for part, prefix in _PARTS.items():
                pixels = _pixels(path, f"{prefix}_images", archive, self.facts.channels)
                columns = _columns(path, f"{prefix}_labels", archive, len(pixels), len(findings))
                check_labels(columns, 0, len(classes) or 2, path)
                factors = dict(zip(findings, columns.T, strict=False))
                labels = no_labels(len(pixels)) if findings else columns[:, 0]
                append(writer, part, pixels, labels, factors)
        if findings:
            writer.names |= dict.fromkeys(findings, ("absent", "present"))
            writer.notes.append(
                f"{self.name} has no classes: its {len(findings)} findings are factors"
            )
        return classes


def _pixels(path: Path, key: str, archive: Any, channels: int) -> Pixels:
    """The images (n, 28, 28, channels), stored without the last axis if they are grey."""
    pixels: Pixels = archive[key]
    shape = (SIDE, SIDE) if channels == 1 else (SIDE, SIDE, channels)
    if pixels.dtype != np.uint8 or pixels.shape[1:] != shape or not pixels.size:
        raise DataError(
            f"'{key}' of {path} is {pixels.dtype} {pixels.shape}; expected uint8 {('n', *shape)}"
        )
    return pixels.reshape(-1, SIDE, SIDE, channels)


def _columns(path: Path, key: str, archive: Any, count: int, findings: int) -> Integers:
    """The labels, with one column (n, 1) or one for each finding."""
    labels: npt.NDArray[Any] = archive[key]
    expected = (count, findings or 1)
    if labels.dtype.kind not in "iu" or labels.shape != expected:
        raise DataError(
            f"'{key}' of {path} is {labels.dtype} {labels.shape}; expected integers {expected}"
        )
    return labels.astype(np.int64)


def _register(name: str, facts: Facts) -> None:
    """Create the class of one data set and register it under its name."""
    train, validation, test = facts.counts
    colour = "in colour" if facts.channels == 3 else "grey"
    file = f"{name}.npz"
    content = {
        "__module__": __name__,
        "__doc__": f"{facts.title}: {facts.shows}, {train:,} training, {validation:,} validation "
        f"and {test:,} test images, 28x28 {colour}.",
        "facts": facts,
        "about": About(
            (SIDE, SIDE, facts.channels), len(facts.classes) or None, train, test, facts.licence
        ),
        "source": Source(
            page="https://medmnist.com/",
            layouts=({file: facts.md5},),
            remotes=(Remote(file, (f"{_PLACE}{file}?download=1",), facts.md5),),
        ),
    }
    datasets(name)(type(facts.title, (MedMnist,), content))


for _name, _facts in FACTS.items():
    _register(_name, _facts)
