"""What a federation keeps is closed to others, and can be cleaned up without losing what counts."""

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harmonium.core.errors import ConfigError, StoreError
from harmonium.sites.folder import add_site, enrol, init, remove_site, renew
from harmonium.sites.kit import keygen
from harmonium.sites.upkeep import (
    RUNNING,
    SERVING,
    owner_only,
    removable_at_server,
    removable_at_site,
    remove,
    restrict_to_owner,
    single_instance,
)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    return [str(p) for p in (folder, *folder.rglob("*")) if stat.S_IMODE(p.stat().st_mode) & 0o077]


def test_a_federation_is_closed_to_others_whatever_the_umask(umask: None, tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    init(folder, ["north"], ["localhost"])
    enrol(folder, "own", keygen(tmp_path / "kit"))
    add_site(folder, "south")
    remove_site(folder, "south")
    renew(folder)
    assert not open_to_others(folder) and not open_to_others(tmp_path / "kit")


def test_what_was_open_is_closed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o755)
    (tmp_path / "runs" / "a").write_text("x")
    (tmp_path / "runs" / "a").chmod(0o666)
    (tmp_path / "runs" / "away").symlink_to(tmp_path / "nowhere")
    restrict_to_owner(tmp_path / "runs")
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "runs" / "a").stat().st_mode) == 0o600


def test_the_umask_comes_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with pytest.raises(ZeroDivisionError), owner_only():
            (tmp_path / "a").touch()
            raise ZeroDivisionError
        (tmp_path / "b").touch()
        assert [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in "ab"] == [0o600, 0o644]
    finally:
        os.umask(before)


def kept(folder: Path, **ages: float) -> Path:
    """What a site keeps: runs of which nothing was written for so many days."""
    for name, days in ages.items():
        run = folder / "runs" / name
        (run / "clients" / "0").mkdir(parents=True)
        names = ["answer-0.safetensors", "answer-0.json", "encoder.safetensors", "recipe.yaml"]
        for path in (
            *(run / name for name in (*names, "run.json")),
            run / "clients/0/1.safetensors",
        ):
            path.write_text("content")
        then = time.time() - days * 86400
        for path in (*run.rglob("*"), run):
            os.utime(path, (then, then))
    (folder / "log.jsonl").write_text("{}\n")
    return folder


def names(found: list) -> list[str]:
    return [f"{one.path.parent.name}/{one.path.name}" for one in found]


def test_a_sites_old_answers_and_states_go_and_all_else_stays(tmp_path: Path) -> None:
    folder = kept(tmp_path, old=40, new=3)
    found = removable_at_site(folder, 30)
    assert names(found) == ["old/answer-0.json", "old/answer-0.safetensors", "old/clients"]
    assert all(one.path.exists() and one.size == 7 for one in found)  # as a dry run leaves it
    remove(found)
    remove(found)  # nothing is left to delete
    left = sorted(path.name for path in (folder / "runs" / "old").iterdir())
    assert left == ["encoder.safetensors", "recipe.yaml", "run.json"]
    assert (folder / "log.jsonl").exists() and len(list((folder / "runs/new").iterdir())) == 6
    with pytest.raises(ConfigError, match="0 or more"):
        removable_at_site(folder, -1)


def test_the_newest_run_of_a_client_that_is_running_stays(tmp_path: Path) -> None:
    folder = kept(tmp_path, old=40, older=50)
    with single_instance(folder, RUNNING, "client"):
        assert {name.partition("/")[0] for name in names(removable_at_site(folder, 1))} == {"older"}
        with pytest.raises(StoreError, match="another client is running"):
            single_instance(folder, RUNNING, "client").__enter__()
    assert {name.partition("/")[0] for name in names(removable_at_site(folder, 1))} == {
        "old",
        "older",
    }


def test_a_server_keeps_the_last_commit_and_what_is_in_use(tmp_path: Path) -> None:
    folder, run = tmp_path / "federation", tmp_path / "run"
    (folder / "link").mkdir(parents=True)
    for name in ("flower.db", "flower.db-wal", "link.log"):
        (folder / "link" / name).write_text("x")
    (run / "commits").mkdir(parents=True)
    for name in ("000001.json", "000001.safetensors", "000002.json", "000002.safetensors"):
        (run / "commits" / name).write_text("x")
    with pytest.raises(ConfigError, match="holds no run"):
        removable_at_server(folder, run)
    (run / "recipe.yaml").write_text("")
    with pytest.raises(ConfigError, match="is not complete"):
        removable_at_server(folder, run)
    (run / "result.json").write_text(json.dumps({}))
    with single_instance(folder, SERVING, "server"):
        assert names(removable_at_server(folder)) == []
    found = removable_at_server(folder, run)
    assert names(found) == [
        *("link/flower.db", "link/flower.db-wal"),
        *("commits/000001.json", "commits/000001.safetensors"),
    ]
