"""The demo: exact sources, lengths without a scan, a loss over real labels, one gradient in every strategy."""

import ast
import json
import sysconfig
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch.optim import SGD
from transformers import LlamaForCausalLM

from lightning_balance.demo import CausalLM, FunctionsDataModule, PadCollator, TokenDataset, byte_tokens, find_functions
from lightning_balance.demo.data import encode
from tests.distributed import run_ranks
from tests.tiny_models import save_tiny_llama

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


@pytest.fixture
def source_root(tmp_path):
    root = tmp_path / "sources"
    (root / "b").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "b" / "z.py").write_text(
        "class A:\n    @property\n    def x(self):\n        def inner(): ...\n        return 'é'  # é\n"
    )
    (root / "a.py").write_text("if True:\n    async def f(): pass\n\x0c\ndef g(): return 'ü'  # comment\n")
    (root / "broken.py").write_text("def h(:\n")
    (root / "latin.py").write_bytes("# coding: latin-1\ndef l(): return 'é'\n".encode("latin-1"))
    (root / "tests" / "t.py").write_text("def in_a_test(): ...\n")
    return root


def batch_of(*lengths):
    generator = np.random.default_rng(0)
    return PadCollator()([{"input_ids": torch.tensor(generator.integers(0, 256, length))} for length in lengths])


class TestFunctions:
    def test_sources_are_exact_and_in_order(self, source_root):
        functions = find_functions(source_root)
        assert [(function.name, function.source) for function in functions] == [
            ("a.py:2 f", "async def f(): pass"),
            ("a.py:4 g", "def g(): return 'ü'"),
            ("b/z.py:3 x", "def x(self):\n        def inner(): ...\n        return 'é'"),
            ("latin.py:2 l", "def l(): return 'é'"),
        ]

    def test_sources_of_the_standard_library_are_those_of_ast(self):
        root = Path(sysconfig.get_paths()["stdlib"])
        by_name = {function.name: function.source for function in find_functions(num_files=25)}
        path = "argparse.py"
        source = (root / path).read_text()
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        compared = 0
        for node in nodes:
            name = f"{path}:{node.lineno} {node.name}"
            if name in by_name:
                assert by_name[name] == ast.get_source_segment(source, node)
                compared += 1
        assert compared > 100

    def test_the_standard_library_has_thousands_of_functions_with_a_long_tail(self):
        lengths = np.array([len(function.source) for function in find_functions(num_functions=5000)])
        assert len(lengths) == 5000
        assert np.percentile(lengths, 99) > 8 * np.median(lengths)

    def test_limits_take_the_first_functions(self, source_root):
        functions = find_functions(source_root)
        assert find_functions(source_root, num_functions=3) == functions[:3]
        assert find_functions(source_root, num_files=1) == functions[:2]

    @pytest.mark.parametrize("name", ["num_functions", "num_files"])
    def test_a_limit_below_one_is_an_error(self, name):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, or None for all, got 0"):
            find_functions(**{name: 0})

    def test_a_folder_without_functions_is_an_error(self, tmp_path):
        with pytest.raises(ValueError, match="root must hold Python files with functions"):
            find_functions(tmp_path)


class TestData:
    def test_lengths_are_those_of_the_samples(self):
        dataset = TokenDataset([byte_tokens(text) for text in ("ab", "abcdef", "abc")], max_length=4)
        assert dataset.lengths.tolist() == [len(dataset[i]["input_ids"]) for i in range(len(dataset))] == [2, 4, 3]
        assert bytes(dataset[1]["input_ids"].tolist()) == b"abcd"

    def test_padding_has_no_labels(self):
        batch = batch_of(3, 5)
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
        assert (batch["labels"] == torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)).all()

    def test_padded_length_is_a_multiple(self):
        batch = PadCollator(pad_to_multiple_of=8)([{"input_ids": torch.arange(9)}])
        assert {tuple(value.shape) for value in batch.values()} == {(1, 16)}

    def test_every_function_is_trained_on_or_held_out(self, source_root):
        data = FunctionsDataModule(root=str(source_root), val_every=4)
        data.setup("fit")
        data.setup("fit")
        assert (len(data.train_dataset), len(data.val_dataset)) == (3, 1)
        assert bytes(data.val_dataset[0]["input_ids"].tolist()).decode() == "def l(): return 'é'"

    def test_hparams_round_trip(self):
        data = FunctionsDataModule(batch_size=3, num_functions=10)
        assert FunctionsDataModule(**data.hparams).hparams == data.hparams

    def test_a_checkpoint_without_tokenizer_gets_bytes_within_its_vocabulary(self, tmp_path):
        save_tiny_llama(tmp_path, vocab_size=100)
        assert [tokens.tolist() for tokens in encode(["az"], str(tmp_path))] == [[97, 99]]

    def test_a_checkpoint_with_tokenizer_is_tokenized_by_it(self, tmp_path):
        save_tiny_llama(tmp_path)
        save_word_tokenizer(tmp_path)
        assert [tokens.tolist() for tokens in encode(["def return", "return"], str(tmp_path))] == [[1, 2], [2]]

    @pytest.mark.parametrize("make", [lambda path: encode(["a"], path), lambda path: CausalLM(checkpoint=path)])
    def test_a_missing_checkpoint_is_named(self, make):
        with pytest.raises(ValueError, match=r"checkpoint must be a folder .* found none at 'nowhere'"):
            make("nowhere")


def save_word_tokenizer(folder):
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "def": 1, "return": 2}, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class TestModel:
    def test_loss_is_the_mean_over_target_tokens_whatever_the_padding(self):
        module = CausalLM(**SMALL)
        module.configure_model()
        with torch.no_grad():
            together = module(batch_of(4, 9))
            rows = [
                {key: value[i : i + 1, :length] for key, value in batch_of(4, 9).items()}
                for i, length in ((0, 4), (1, 9))
            ]
            alone = [module(row) for row in rows]
        torch.testing.assert_close(together, (3 * alone[0] + 8 * alone[1]) / 11)

    def test_training_learns(self, tmp_path):
        L.seed_everything(0)
        data = FunctionsDataModule(num_functions=40, val_every=5, batch_size=4, max_length=64)
        module = CausalLM(**SMALL, learning_rate=0.03)
        trainer = L.Trainer(accelerator="cpu", max_epochs=4, **QUIET)
        trainer.fit(module, data)
        assert trainer.callback_metrics["val/loss"] < 4.0  # 5.5 = log(256) untrained
        assert trainer.validate(module, data, verbose=False)[0]["val/loss"] == pytest.approx(
            trainer.callback_metrics["val/loss"].item()
        )
        assert set(trainer.test(module, data, verbose=False)[0]) == {"test/loss"}
        assert trainer.predict(module, data)[0].ndim == 2

    def test_a_checkpoint_keeps_its_weights(self, tmp_path):
        save_tiny_llama(tmp_path)
        module = CausalLM(checkpoint=str(tmp_path))
        module.configure_model()
        saved = LlamaForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(module.model.state_dict(), saved.state_dict())
        assert module.model.training


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class OneStep(CausalLM):
    """Two equal micro-batches on each rank, so that the mean over ranks is the gradient of one micro-batch."""

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        return torch.utils.data.DataLoader([batch_of(4, 9)] * 2, batch_size=None)

    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for parameter in self.parameters()]
        full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
        self.norm = torch.stack([g.norm() for g in full]).norm().item()


def gradient_norms(strategies, num_ranks, checkpoint):
    """By strategy, for a model with random weights and for the checkpoint."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    norms = []
    for source in (None, checkpoint):
        for name in strategies:
            L.seed_everything(0)
            strategy = ModelParallelStrategy(num_ranks, 1) if name == "fsdp2" else name
            module = OneStep(**SMALL, checkpoint=source)
            L.Trainer(accelerator="cpu", devices=num_ranks, strategy=strategy, max_steps=1, **QUIET).fit(module)
            norms.append(module.norm)
    return norms


def test_every_strategy_gives_the_same_gradient(tmp_path):
    save_tiny_llama(tmp_path, vocab_size=256)
    (one,) = run_ranks(gradient_norms, 1, ["auto"], 1, str(tmp_path))
    assert one[0] > 0
    assert one[1] > 0
    for norms in run_ranks(gradient_norms, 2, ["ddp", "fsdp2"], 2, str(tmp_path)):
        assert norms == pytest.approx([one[0], one[0], one[1], one[1]], rel=1e-5)
