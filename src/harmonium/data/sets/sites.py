"""The images of a federation's sites, which are not on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harmonium.core.errors import ConfigError
from harmonium.data.cache import Stored
from harmonium.data.datasets import About, DataSpec, datasets
from harmonium.data.decoding.image_files import check_levels


@datasets("sites")
@dataclass(frozen=True)
class Sites(DataSpec):
    """The images of a federation's sites, for a server that has no images to evaluate with.

    Only the shape is known: every site brings its own images to a square of `size` by `fit`, and
    to `channels`. A `window` or `percentiles` given here hold at every site. Used by `harmonium
    server start`; see docs/federation.md.
    """

    size: int = 32  # side to which every site brings its images
    channels: int = 3  # 3: colour, 1: grey, 2 and 4: as the sites' images are stored
    classes: tuple[str, ...] = ()  # all classes by name, for methods that read labels
    window: tuple[float, float] | None = None  # of DICOM and 16-bit grey; None: each site's own
    percentiles: tuple[float, float] | None = None  # instead, of each image; None: each site's own

    about: ClassVar[About | None] = About(None, 0, None, None, "each site's own")

    def check(self) -> None:
        """Check the window and the percentiles too."""
        super().check()
        check_levels(self.window, self.percentiles)

    def stored(self) -> Stored:
        """Raises ConfigError, as there are no images on this machine."""
        raise ConfigError(
            "data=sites: the images are at the sites of a federation; start it with `harmonium "
            "server start`, or name a data set that is here"
        )
