"""Large models: they pass, and memory stays within bounds."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.deploy


def peak(pid: int) -> float:
    """Most memory that a process has held, in GB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1e6


def test_resnet_50_passes(stage, seen):
    """ResNet-50, trained by three sites for one round."""
    stage.init()
    server = stage.server(
        "data=sites",
        "data.size=8",
        "data.channels=1",
        "encoder=resnet50",
        "encoder.width=64",
        "rounds=1",
        "local.batch=4",  # a policy asks for two steps, and each site has 8 images
    )
    sites = [stage.site(name, "data.limit=24") for name in ("north", "south", "west")]
    server.ends(seconds=600)
    sizes = [line["up"]["model"] for line in stage.ledger() if line["outcome"] == "answered"]
    assert len(sizes) == 3 and min(sizes) > 90e6
    assert all("the run is over" in site.ends() for site in sites)
    seen(f"{sizes[0] / 1e6:.0f} MB each way and site")


def test_500_megabytes_pass(stage, children, seen):
    """A model of 500 MB to one site and back."""
    stage.init(sites=("north",))
    large = ("objective.hidden=11100", "objective.out=11100", "rounds=1", "local.batch=4")
    server = stage.server("data=sites", "data.size=8", "data.channels=1", *large)
    site = stage.site("north", "data.limit=24", once=False)
    site.says("the run is over", seconds=900)
    held = {"site": peak(site.process.pid), "server": peak(server.process.pid)}
    held["SuperLink"] = max(map(peak, children(server.process.pid)))
    server.ends(seconds=600)
    (line,) = stage.ledger()
    assert line["outcome"] == "answered" and line["up"]["model"] > 500e6
    memory = ", ".join(f"{who} {size:.1f} GB" for who, size in held.items())
    seen(f"{line['up']['model'] / 1e6:.0f} MB each way; most memory: {memory}")
