"""The page on using encoders: its commands and its code are run in order, as printed."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PAGE = Path(__file__).parents[2] / "docs" / "using-encoders.md"
Call = Callable[..., tuple[str, str]]


@pytest.mark.usefixtures("unrendered")
def test_the_page_works_as_printed(
    trained: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "runs/first")
    rng, lines = np.random.default_rng(0), ["path,label,group"]
    for number in range(12):
        name = "down" if number % 2 else "across"
        path = Path("images", name, f"{number:02d}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (14, 14, 3), dtype=np.uint8)).save(path)
        lines.append(f"images/{name}/{path.name},{name},patient-{number // 3}")
    Path("labels.csv").write_text("\n".join(lines) + "\n")
    shutil.copy("images/down/05.png", "another.png")
    names: dict[str, object] = {}
    text = PAGE.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language == "python":
            exec(block, names)
        for line in block.splitlines() if not language else ():
            if line.startswith("harmonium "):
                call(*shlex.split(line)[1:])
    for written in ("features.parquet", "found.html", "predictions.csv.json"):
        assert Path(written).is_file()
