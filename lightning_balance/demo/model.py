"""A causal language model as an ordinary LightningModule: it knows nothing of balancing."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_balance.demo.data import IGNORED_LABEL, NUM_BYTES, Sample


class CausalLM(L.LightningModule):
    """A small Llama with random weights, or a pretrained model from a local folder.

    The loss is the mean over the non-ignored labels of the micro-batch, each predicted from the tokens before it.
    Works under single-device, DDP and `ModelParallelStrategy` (FSDP2, each layer is a shard unit).

    Args:
        hidden_size: width of the random model.
        num_layers: its number of layers.
        num_heads: its number of attention heads.
        vocab_size: its number of tokens; 256 is enough for bytes.
        learning_rate: of AdamW.
        checkpoint: folder that `AutoModelForCausalLM` can load; replaces the random model.
        activation_checkpointing: recompute activations in backward to save memory.

    Raises:
        ValueError: `checkpoint` is not a folder.

    Example:
        >>> module = CausalLM(hidden_size=8, num_layers=1, num_heads=2)
        >>> module.configure_model()
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> loss = module({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        >>> loss.isfinite().item()
        True
    """

    def __init__(
        self,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        vocab_size: int = NUM_BYTES,
        learning_rate: float = 3e-4,
        checkpoint: str | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if checkpoint is not None and not Path(checkpoint).is_dir():
            raise ValueError(
                f"checkpoint must be a folder with a saved transformers model, found none at {checkpoint!r}"
            )
        self.save_hyperparameters()
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.vocab_size = vocab_size
        self.learning_rate = learning_rate
        self.checkpoint = checkpoint
        self.activation_checkpointing = activation_checkpointing
        self.model: Any = None
        self.val_loss = MeanMetric()

    def configure_model(self) -> None:
        """Build the model, and shard it when the strategy has a device mesh (FSDP2)."""
        if self.model is not None:
            return
        self.model = self._build()
        if self.activation_checkpointing:
            self.model.gradient_checkpointing_enable()
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for layer in _layers(self.model):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def _build(self) -> nn.Module:
        if self.checkpoint is not None:
            # Float32 master weights; mixed precision is the trainer's business.
            model: nn.Module = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)
            return model.train()
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=8192,
        )
        return LlamaForCausalLM(config)

    def forward(self, batch: Sample) -> Tensor:
        """Mean loss of a micro-batch, a scalar."""
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        """Mean loss of the micro-batch, logged as `train/loss`."""
        loss: Tensor = self(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        """Log `val/loss`, the mean over all target tokens of all ranks."""
        self._evaluate(batch, "val/loss")

    def test_step(self, batch: Sample, batch_idx: int) -> None:
        """Log `test/loss`, the mean over all target tokens of all ranks."""
        self._evaluate(batch, "test/loss")

    def predict_step(self, batch: Sample, batch_idx: int) -> Tensor:
        """The likeliest next token at each position, `(num_samples, padded_length)`."""
        logits: Tensor = self.model(**batch, use_cache=False).logits
        return logits.argmax(dim=-1)

    def configure_optimizers(self) -> Optimizer:
        """AdamW at a constant learning rate."""
        return AdamW(self.parameters(), lr=self.learning_rate)

    def _evaluate(self, batch: Sample, key: str) -> None:
        num_targets = (batch["labels"][:, 1:] != IGNORED_LABEL).sum()
        self.val_loss.update(self(batch), weight=num_targets)
        self.log(key, self.val_loss, prog_bar=True)


def _layers(model: nn.Module) -> nn.ModuleList:
    """The stack of layers of any decoder: its longest `ModuleList`."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
