"""Files that are written whole or not at all."""

import os
import pty
from pathlib import Path

import numpy as np
import pytest

from lightning_balance.calibration.file import write_cost_file
from lightning_balance.calibration.fit import fit_cost
from lightning_balance.calibration.grid import GridPoint
from lightning_balance.control import RunDescription
from lightning_balance.lengths.cache import LengthsCache
from lightning_balance.outputs import check_outputs, whole_file, write_file


def write_a_cost_file(folder):
    points = [GridPoint(1, 8), GridPoint(2, 8), GridPoint(1, 64), GridPoint(4, 64)]
    write_cost_file(folder / "cost.yaml", fit_cost(points, [[8.0], [16.0], [64.0], [256.0]]), {})


def write_a_description(folder):
    RunDescription(max_tokens=8, smallest_max_tokens=1, every_n_steps=1).write(folder)


def write_lengths(folder):
    LengthsCache(folder).save("key", np.array([3, 4]))


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("write", "mode_again"), [(write_a_cost_file, 0o600), (write_a_description, 0o600), (write_lengths, 0o644)]
)
def test_others_may_read_a_new_file_as_the_umask_says_and_an_old_one_keeps_its_mode(write, mode_again, tmp_path):
    write(tmp_path)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    write(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == mode_again  # cached lengths are nobody's own


@pytest.mark.usefixtures("umask")
def test_a_draft_is_no_more_open_than_the_file_it_replaces(tmp_path):
    (tmp_path / "file").touch(0o600)
    with whole_file(tmp_path / "file"):
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("write", [write_a_cost_file, write_a_description, write_lengths])
def test_a_link_stays_one(write, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    [path] = folder.iterdir()
    target = path.rename(tmp_path / "target")
    content = target.read_bytes()
    target.write_bytes(b"old")
    path.symlink_to(target)
    write(folder)
    assert path.is_symlink()
    assert target.read_bytes() == content


def test_a_name_that_is_too_long_is_told_before_the_work(tmp_path):
    with pytest.raises(ValueError, match=r"--json .* cannot be written: File name too long"):
        check_outputs({"--json": tmp_path / ("x" * 300)})


def write_and_be_stopped(file):
    file.write(b"new")
    raise KeyboardInterrupt


def test_what_fails_half_way_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file") as file:
        write_and_be_stopped(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_device_is_written_to_and_stays_one(tmp_path):
    ours, theirs = pty.openpty()  # a device that is only the test's
    (tmp_path / "device").symlink_to(os.ttyname(theirs))
    device = Path(os.ttyname(theirs)).stat()
    write_file(tmp_path / "device", "all of it")
    check_outputs({"--json": tmp_path / "device"})
    assert os.read(ours, 100) == b"all of it"
    assert os.path.samestat(Path(os.ttyname(theirs)).stat(), device)
    os.close(theirs)
    os.close(ours)
