"""A real causal language model: the step's gradient equals that of the whole global batch, whatever the cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_balance import BalanceCallback, plan_epoch
from tests.distributed import run_ranks
from tests.toys import IGNORED, trainer

LARGEST_RELATIVE_ERROR = 1e-6


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Sequences(Dataset[dict[str, Tensor]]):
    """Random tokens; about a quarter of the labels are ignored, in some samples all but one."""

    def __init__(self, lengths: list[int], data_seed: int) -> None:
        rng = np.random.default_rng(data_seed)
        self.lengths = lengths
        self.samples = []
        for length in lengths:
            tokens = torch.from_numpy(rng.integers(0, 32, length))
            labels = tokens.clone()
            labels[torch.from_numpy(rng.random(length) < rng.choice([0.1, 0.25, 0.9]))] = IGNORED
            labels[-1] = tokens[-1]
            self.samples.append({"input_ids": tokens, "labels": labels})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([s["input_ids"] for s in samples], batch_first=True),
        "attention_mask": pad([torch.ones_like(s["input_ids"]) for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED),
    }


class LanguageModel(LightningModule):
    """Returns the model's own loss: a mean over the target tokens of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model()
        self.gradients: list[Tensor] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            mesh = self.trainer.strategy.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        flat = []
        for parameter in self.model.parameters():
            gradient: Any = parameter.grad
            flat.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).flatten())
        self.gradients.append(torch.cat(flat).detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def reference_gradient(data: Sequences, step: list[int]) -> Tensor:
    """Gradient of the mean over all target tokens of the step, in one process, sample by sample, without padding."""
    model = language_model()
    num_targets = sum(int((data[i]["labels"][1:] != IGNORED).sum()) for i in step)
    for index in step:
        sample = data[index]
        logits = model(input_ids=sample["input_ids"][None]).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits[:-1].float(), sample["labels"][1:], ignore_index=IGNORED, reduction="sum"
        )
        (losses / num_targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def relative_errors(
    strategy: str, num_ranks: int, lengths: list[int], data_seed: int, accumulate: int, options: dict[str, Any]
) -> list[float]:
    data = Sequences(lengths, data_seed)
    module = LanguageModel()
    callback = BalanceCallback(loss_reduction="causal_token_mean", seed=data_seed, print_summary=False, **options)
    fitted = trainer(strategy, num_ranks, accumulate_grad_batches=accumulate, callbacks=[callback])
    fitted.fit(module, DataLoader(data, batch_size=2, shuffle=True, collate_fn=collate))
    steps = planned_steps(data, num_ranks, accumulate, data_seed, options)
    errors = []
    for gradient, step in zip(module.gradients, steps, strict=True):
        expected = reference_gradient(data, step)
        errors.append(float((gradient - expected).norm() / expected.norm()))
    return errors


def planned_steps(
    data: Sequences, num_ranks: int, accumulate: int, data_seed: int, options: dict[str, Any]
) -> list[list[int]]:
    """The samples of each step: slices of the seeded shuffle, and the planner's choice where steps exchange samples."""
    per_step = 2 * accumulate * num_ranks
    if options.get("lookahead", 1) == 1:
        order = np.random.default_rng([data_seed, 0]).permutation(len(data)).tolist()
        return [order[i : i + per_step] for i in range(0, len(order), per_step)]
    num_slots = None if "max_tokens" in options else accumulate
    plan = plan_epoch(
        data.lengths, samples_per_step=per_step, num_ranks=num_ranks, num_slots=num_slots, seed=data_seed, **options
    )
    return [plan.step(step).order.tolist() for step in range(plan.num_steps)]


CUTS = st.one_of(
    st.just({}),
    st.just({"pad_to_multiple_of": 4}),
    st.builds(lambda tokens: {"max_tokens": tokens}, st.integers(8, 80)),
    st.builds(lambda tokens: {"max_tokens": tokens, "sync": "micro_batch"}, st.integers(8, 80)),
    st.builds(lambda steps: {"lookahead": steps, "sync": "micro_batch"}, st.integers(2, 4)),
    st.builds(lambda tokens: {"lookahead": 2, "sync": "micro_batch", "max_tokens": tokens}, st.integers(8, 80)),
)


def run_random_cuts(strategy: str, num_ranks: int, num_examples: int) -> float:
    """Largest relative error over random lengths, labels and cuts; every rank draws the same examples."""
    largest = [0.0]

    @seed(num_ranks)
    @settings(
        max_examples=num_examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        lengths=st.lists(st.integers(2, 40), min_size=1, max_size=14),
        data_seed=st.integers(0, 2**16),
        accumulate=st.sampled_from([1, 2, 3]),
        options=CUTS,
    )
    def check(lengths: list[int], data_seed: int, accumulate: int, options: dict[str, Any]) -> None:
        errors = relative_errors(strategy, num_ranks, lengths, data_seed, accumulate, options)
        largest[0] = max(largest[0], *errors)
        assert max(errors) <= LARGEST_RELATIVE_ERROR, (lengths, data_seed, accumulate, options)

    check()
    return largest[0]


@pytest.mark.parametrize(("strategy", "num_ranks", "examples"), [("single", 1, 12), ("ddp", 2, 10), ("fsdp2", 2, 6)])
def test_any_cut_gives_the_gradient_of_the_global_batch(
    strategy: str, num_ranks: int, examples: int, record_property: Callable[[str, object], None]
) -> None:
    errors = run_ranks(run_random_cuts, num_ranks, strategy, num_ranks, examples, timeout_s=240)
    record_property("largest_relative_gradient_error", max(errors))
    sys.stderr.write(f"largest relative gradient error, {strategy} x {num_ranks}: {max(errors):.1e}\n")
    assert 0 < max(errors) <= LARGEST_RELATIVE_ERROR


def run_plain() -> float:
    """The same comparison without the callback."""
    data = Sequences([3, 40, 7, 25, 12, 5, 33, 9], 0)
    module = LanguageModel()
    trainer("ddp", 2, accumulate_grad_batches=2).fit(module, DataLoader(data, batch_size=2, collate_fn=collate))
    expected = reference_gradient(data, list(range(8)))
    return float((module.gradients[0] - expected).norm() / expected.norm())


def test_plain_lightning_fails_the_same_comparison() -> None:
    assert min(run_ranks(run_plain, 2)) > 0.01
