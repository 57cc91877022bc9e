"""`pip install` brings the files of the tree."""

from __future__ import annotations

import email
import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from parrot_gateway import __version__

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made without a network."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="pip install hatchling")
    folder = str(tmp_path_factory.mktemp("dist"))
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
    return Path(path)


def tracked() -> Iterator[str]:
    """Files of the packages as the repository has them, new ones too, by their place in a wheel."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a checkout of the repository")
    for name in listed.stdout.splitlines():
        package = next(each for each in PACKAGES if name.startswith(f"{each}/"))
        if (ROOT / name).is_file():
            yield os.path.relpath(name, os.path.dirname(package))


def test_the_wheel_has_every_file(built: Path) -> None:
    with ZipFile(built) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == set(tracked())
        # A user interface and a model: not Python, and needed.
        for ending in (
            "parrot_gateway/ui/static/index.html",
            "parrot_engine/assets/demo/model.safetensors",
        ):
            assert ending in names
            assert wheel.getinfo(ending).file_size > 0
    assert built.stat().st_size < 12_000_000


def test_every_package_has_its_types(built: Path) -> None:
    with ZipFile(built) as wheel:
        names = set(wheel.namelist())
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    # llama_index is a namespace that others share: each of its packages has its own.
    packages = packages - {"llama_index"} | {
        f"llama_index/{part}/parrot" for part in ("llms", "embeddings")
    }
    assert {f"{package}/py.typed" for package in packages} <= names
    assert "llama_index/__init__.py" not in names


def test_metadata(built: Path) -> None:
    with ZipFile(built) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
        (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert b"parrot-gateway = parrot_gateway.cli:main" in wheel.read(entry)
        assert [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(PROJECT["project"]["optional-dependencies"]) == set(
        metadata.get_all("Provides-Extra", [])
    )
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert not [each for each in required if "torch" in each]


def test_the_source_archive_is_what_the_wheel_is_made_of() -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="pip install hatchling")
    files = sdist.SdistBuilder(str(ROOT)).recurse_included_files()
    names = {file.distribution_path for file in files}
    sources = {name for package in PACKAGES for name in names if name.startswith(f"{package}/")}
    assert len(sources) == len(set(tracked()))
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} == names - sources
