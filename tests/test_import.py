"""The layers: what may be imported where, shown in fresh interpreters and in the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_balance

PACKAGE = Path(lightning_balance.__file__).parent

# A module that is not listed belongs to layer 2, which may import everything. A folder stands for all modules in it.
LAYERS = {
    0: (
        "control",
        "calibration",
        "cost",
        "efficiency",
        "epoch",
        "evaluation.plan",
        "lookahead",
        "micro_batches",
        "outputs",
        "partition",
        "plan",
        "progress",
        "report",
        "rules",
        "schedule",
        "settings",
        "shuffle",
        "unbalanced",
        "validation",
    ),
    1: (
        "_reinstantiation",
        "agreement",
        "evaluation.fillers",
        "evaluation.list_states",
        "evaluation.ordering",
        "evaluation.sampler",
        "lengths",
        "memory",
        "metrics",
        "sampler",
    ),
}
FOREIGN_TO = {
    0: ("torch", "lightning", "torchmetrics", "transformers", "datasets"),
    1: ("lightning", "pytorch_lightning"),
}


def loaded_by(statement, packages=("torch", "lightning")):
    """Which of the packages a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {packages!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def modules():
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py" and path != PACKAGE / "__init__.py"
    )


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name):
    return next((layer for layer, names in LAYERS.items() if any(f"{name}.".startswith(f"{n}.") for n in names)), 2)


def imports_of(path):
    """Absolute names of everything a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults_of(path):
    """The imports that the module's layer forbids."""
    layer = layer_of(name_of(path))
    for imported in imports_of(path):
        root, _, inner = imported.partition(".")
        if root == "lightning_balance":
            is_public_name = inner in lightning_balance.__all__ and inner != "metrics"
            if is_public_name or layer_of(inner) > layer:
                yield imported
        elif root in FOREIGN_TO.get(layer, ()):
            yield imported


def test_importing_the_package_loads_neither_torch_nor_lightning():
    assert loaded_by("import lightning_balance; lightning_balance.__version__; dir(lightning_balance)") == []


@pytest.mark.parametrize("name", LAYERS[0])
def test_layer_0_loads_neither_torch_nor_lightning(name):
    assert loaded_by(f"import lightning_balance.{name}") == []


def test_planning_loads_neither_torch_nor_lightning():
    assert loaded_by("import lightning_balance as lb; lb.plan_step([3, 5, 9, 2], num_ranks=2).micro_batch(0, 0)") == []


def test_the_check_of_what_is_loaded_can_fail():
    assert loaded_by("import lightning_balance.sampler") == ["torch"]
    assert loaded_by("import lightning_balance as lb; lb.BalanceCallback") == ["torch", "lightning"]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_imports_upward(path):
    assert list(faults_of(path)) == []


@pytest.mark.parametrize(
    ("name", "line", "is_fault"),
    [
        ("plan.py", "import torch", True),
        ("plan.py", "def f():\n    from torch import Tensor", True),
        ("plan.py", "from lightning_balance import sampler", True),
        ("plan.py", "from lightning_balance.sampler import BalancedBatchSampler", True),
        ("plan.py", "from lightning_balance import BalanceCallback", True),
        ("plan.py", "from lightning_balance.cost import CostModel", False),
        ("sampler.py", "import torch", False),
        ("sampler.py", "import lightning as L", True),
        ("sampler.py", "from lightning_balance.callback import BalanceCallback", True),
        ("partition/deep.py", "from lightning_balance.metrics import CostSpread", True),
        ("callback.py", "import lightning\nfrom lightning_balance.sampler import BalancedBatchSampler", False),
    ],
)
def test_the_check_of_layers_can_fail(name, line, is_fault, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert bool(list(faults_of(path))) is is_fault


@pytest.mark.parametrize("name", lightning_balance.__all__)
def test_every_public_name_resolves(name):
    assert getattr(lightning_balance, name) is not None
    assert name in dir(lightning_balance)


def test_the_lazy_names_are_the_ones_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in guard.body for alias in node.names}
    assert {*seen, "__version__"} == set(lightning_balance.__all__)
    for name, module in lightning_balance._MODULE_OF.items():
        assert seen[name] == f"lightning_balance.{module}"


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'lightning_balance' has no attribute 'BalancedCallback'"):
        _ = lightning_balance.BalancedCallback
