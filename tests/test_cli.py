"""The command line: what its help shows, and that mistakes end in one sentence before training starts."""

import inspect
import sys

import pytest

from lightning_balance import BalanceCallback
from lightning_balance.cli import COMMANDS, main
from tests.command import REPOSITORY

DEMO = str(REPOSITORY / "configs" / "demo.yaml")


@pytest.fixture(autouse=True)
def clean_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # LightningCLI saves its config where it runs
    # LightningCLI warns when it gets arguments while the process, here pytest, has some too.
    monkeypatch.setattr(sys, "argv", ["lightning-balance"])


def error_of(capsys, *words):
    """The text a failing command ends with."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code not in (0, None)
    text = capsys.readouterr().err
    return text + exit_.value.code if isinstance(exit_.value.code, str) else text


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_names_every_command(words, capsys):
    main(words)
    output = capsys.readouterr().out
    assert all(command in output for command in COMMANDS)


def test_help_of_a_command_shows_the_trainer_and_our_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help"])
    output = capsys.readouterr().out
    assert "--num_cpu_processes" in output
    assert "--trainer.accumulate_grad_batches" in output


@pytest.mark.parametrize("name", ["BalanceCallback", "lightning_balance.BalanceCallback"])
def test_help_of_the_callback_shows_every_option(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", f"--trainer.callbacks.help={name}"])
    output = capsys.readouterr().out
    for option in inspect.signature(BalanceCallback).parameters:
        assert f".{option} " in output


def test_an_unknown_command_is_named_with_the_known_ones(capsys):
    assert f"no command 'train': use one of {', '.join(COMMANDS)}, or" in error_of(capsys, "train")


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert "pip install 'lightning-balance[cli]'" in error_of(capsys, "fit", "--config", DEMO)


def test_a_missing_config_is_named(capsys):
    assert "nowhere.yaml" in error_of(capsys, "fit", "--config", "nowhere.yaml")


@pytest.mark.parametrize("option", ["loss_reduction", "lengths", "cost"])
def test_a_bad_dotted_path_in_yaml_is_an_error_that_names_it(option, tmp_path, capsys):
    config = tmp_path / "bad.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_balance.BalanceCallback\n"
        f"      init_args:\n        {option}: no_such_module.no_such_function\n"
    )
    words = [
        "fit",
        "--config",
        DEMO,
        "--config",
        str(config),
        "--num_cpu_processes",
        "null",
        "--data.num_functions",
        "20",
    ]
    with pytest.raises((SystemExit, ValueError)) as error:
        main([*words, "--trainer.accelerator", "cpu", "--trainer.logger", "false"])
    assert f"{option}='no_such_module.no_such_function'" in str(error.value) + capsys.readouterr().err


def test_a_dotted_path_in_yaml_becomes_the_callable(tmp_path, capsys):
    config = tmp_path / "good.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_balance.BalanceCallback\n"
        "      init_args:\n        lengths: builtins.len\n        cost: lightning_balance.efficiency.pad_efficiency\n"
    )
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", DEMO, "--config", str(config), "--print_config"])
    output = capsys.readouterr().out
    assert "lengths: builtins.len" in output or "lengths: len" in output
    assert "lightning_balance.efficiency.pad_efficiency" in output


CALLBACK = ("--trainer.callbacks+=BalanceCallback", "--trainer.callbacks")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num_cpu_processes", "0"], "num_cpu_processes must be at least 1, or null for one process, got 0"),
        ([CALLBACK[0], f"{CALLBACK[1]}.max_tokens=-1"], "max_tokens must be an integer >= 1, got -1"),
        ([CALLBACK[0], f"{CALLBACK[1]}.cost=nofile.yaml"], "cost='nofile.yaml' is no file"),
        (
            [CALLBACK[0], f"{CALLBACK[1]}.loss_reduction=broken_module.count"],
            "loss_reduction='broken_module.count' is not an importable function: TypeError: unsupported operand",
        ),
    ],
)
def test_a_mistake_in_our_options_is_one_sentence(words, sentence, tmp_path, monkeypatch, capfd):
    (tmp_path / "broken_module.py").write_text("1 + ''")
    monkeypatch.syspath_prepend(tmp_path)
    last = error_of(capfd, "fit", "--config", DEMO, *words).splitlines()[-1]
    assert last.startswith(f"lightning-balance fit: error: {sentence}")


def test_processes_of_the_cpu_are_not_for_machines_with_an_accelerator(monkeypatch):
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator

    from lightning_balance.lightning_cli import runs_on_cpu

    for accelerator in (CUDAAccelerator, MPSAccelerator, XLAAccelerator):
        monkeypatch.setattr(accelerator, "is_available", lambda: False)
    assert runs_on_cpu("auto")
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
    assert not runs_on_cpu("auto")
    assert not runs_on_cpu("gpu")
    assert runs_on_cpu("cpu")
    assert runs_on_cpu(CPUAccelerator())


@pytest.mark.parametrize(("command", "figure"), [("validate", "val/loss"), ("test", "test/loss"), ("predict", "")])
def test_the_other_commands_run(command, figure, capsys):
    options = ["--data.num_functions", "100", "--data.max_length", "64", "--num_cpu_processes", "null"]
    main([command, "--config", DEMO, *options, "--trainer.accelerator", "cpu", "--trainer.logger", "false"])
    assert figure in capsys.readouterr().out
