import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksError, RanksTimeoutError, run_ranks
from tests.forks import fork_server


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


def random_numbers():
    of_numpy = np.random.random()  # noqa: NPY002 - the state that all of a process share is what this is about
    return torch.initial_seed(), of_numpy, random.random(), hash("a string")


def path_and_folder():
    return sys.path[0], str(Path.cwd()), os.environ.get("ONLY_IN_ONE_TEST")


def close_stdout_on_rank_1():
    if os.environ["RANK"] == "1":
        sys.stdout.close()


def end_without_a_result():
    os._exit(0)


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
    run_ranks(os.getpid, 2)  # what the servers import is no time of the ranks
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
    run_ranks(os.getpid, 2)
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


def test_ranks_have_seeds_of_their_own():
    """As interpreters that are started one by one; what ranks only have in common by chance shows as a difference."""
    first, second = run_ranks(random_numbers, 2), run_ranks(random_numbers, 2)
    for drawn in list(zip(*first, *second, strict=True))[:3]:
        assert len(set(drawn)) == 4
    assert first[0][3] != first[1][3]
    assert first[0][3] != second[0][3]


def test_a_rank_runs_where_the_test_does(tmp_path, monkeypatch):
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            patch.setenv("ONLY_IN_ONE_TEST", folder.name)
            assert run_ranks(path_and_folder, 1) == [(str(folder), str(folder), folder.name)]
    assert run_ranks(path_and_folder, 1)[0][2] is None


def test_a_rank_that_closes_its_output_fails_alone():
    with pytest.raises(RanksError, match="I/O operation on closed file") as error:
        run_ranks(close_stdout_on_rank_1, 2)
    assert error.value.exit_codes == [0, 1]


def test_a_rank_that_ends_without_a_result_is_reported():
    with pytest.raises(RanksError, match="ended without a result"):
        run_ranks(end_without_a_result, 1)


def test_ranks_start_again_after_a_request_that_was_interrupted(monkeypatch):
    def interrupted(stream):
        raise KeyboardInterrupt

    servers = [fork_server(0), fork_server(1)]
    monkeypatch.setattr("tests.forks.pickle.load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(os.getpid, 2)
    monkeypatch.undo()
    assert sum(server.is_open for server in servers) == 1
    assert len(set(run_ranks(os.getpid, 2))) == 2


def write_pid_and_wait(folder):
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_ranks_of_a_server_that_is_killed_are_killed_too(tmp_path):
    def kill_the_server_of_rank_0():
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"):
            time.sleep(0.02)
        servers[0]._process.kill()

    servers = [fork_server(0), fork_server(1)]
    killer = threading.Thread(target=kill_the_server_of_rank_0)
    killer.start()
    with pytest.raises(RuntimeError, match="the server of forks ended with -9"):
        run_ranks(write_pid_and_wait, 2, str(tmp_path))
    killer.join()
    pids = [int((tmp_path / name).read_text()) for name in "01"]
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_a_server_that_is_gone_is_named_once_and_replaced():
    server = fork_server()
    server._process.kill()
    with pytest.raises(RuntimeError, match="the server of forks ended with -9"):
        server.start(os.getpid, (), env={}, output=Path(os.devnull), limit_s=1)
    assert len(run_ranks(os.getpid, 2)) == 2


def test_a_function_that_a_rank_cannot_import_is_refused():
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(lambda: None, 1)
