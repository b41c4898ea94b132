import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksError, RanksTimeoutError, run_ranks


def sum_of_ranks(factor):
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() * factor)])
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), torch.get_num_threads()


def hang_on_rank_0():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))  # rank 1 never joins
    else:
        time.sleep(600)


def raise_on_rank_1():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("a clear sentence")
    dist.all_reduce(torch.zeros(1))


class HangingDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(600)


def wait_for_a_worker_that_hangs():
    next(iter(torch.utils.data.DataLoader(HangingDataset(), num_workers=1)))


def leave_a_child(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))


def world_of_a_trainer(num_ranks):
    import lightning as L

    trainer = L.Trainer(accelerator="cpu", devices=num_ranks, logger=False, barebones=True)
    return trainer.world_size, trainer.global_rank, type(trainer.strategy.cluster_environment).__name__


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_ranks_run_the_function_together():
    assert run_ranks(sum_of_ranks, 2, 10) == [(10.0, 0, 1), (10.0, 1, 1)]


def test_one_rank_runs_in_its_own_process():
    assert run_ranks(os.getpid, 1) != [os.getpid()]


def test_a_trainer_joins_the_ranks_instead_of_launching_more():
    assert run_ranks(world_of_a_trainer, 2, 2) == [(2, rank, "TorchElasticEnvironment") for rank in range(2)]


def test_a_rank_that_hangs_in_a_collective_is_killed_at_the_timeout():
    start = time.monotonic()
    with pytest.raises(RanksTimeoutError, match=r"hang_on_rank_0 on 2 ranks ran past 8 s") as error:
        run_ranks(hang_on_rank_0, 2, timeout_s=8)
    assert time.monotonic() - start < 15
    assert error.value.exit_codes == [-9, -9]
    assert "all_reduce" in error.value.outputs[0]  # the stack it was killed in


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_stacks_of_a_rank_tell_where_its_workers_hang():
    with pytest.raises(RanksTimeoutError, match=r"line \d+ in __getitem__"):
        run_ranks(wait_for_a_worker_that_hangs, 1, timeout_s=10)


def test_a_rank_that_raises_is_reported_and_the_others_are_not_waited_for():
    start = time.monotonic()
    with pytest.raises(RanksError, match="a clear sentence") as error:
        run_ranks(raise_on_rank_1, 2, timeout_s=100)
    assert time.monotonic() - start < 40
    assert error.value.exit_codes[1] == 1


def test_children_of_a_rank_are_killed_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    run_ranks(leave_a_child, 1, str(pid_file))
    deadline = time.monotonic() + 5
    while is_running(int(pid_file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid_file.read_text()))


def test_a_function_that_a_rank_cannot_import_is_refused():
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(lambda: None, 1)
