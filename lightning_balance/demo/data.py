"""Functions as token sequences, a padding collator, and the LightningDataModule around them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_balance.demo.functions import find_functions

Sample = dict[str, Tensor]

NUM_BYTES = 256
IGNORED_LABEL = -100


class TokenDataset(Dataset[Sample]):
    """Token sequences clipped at `max_length`; `lengths` is known from the start, so no one has to read the samples.

    Args:
        sequences: token ids, one array a sample.
        max_length: longer sequences lose their end.

    Example:
        >>> dataset = TokenDataset([np.arange(3), np.arange(9)], max_length=4)
        >>> dataset.lengths.tolist(), dataset[1]["input_ids"].tolist()
        ([3, 4], [0, 1, 2, 3])
    """

    def __init__(self, sequences: Sequence[npt.NDArray[np.int64]], max_length: int) -> None:
        if max_length < 2:
            raise ValueError(f"max_length must be at least 2 (one token to predict from another), got {max_length}")
        # One flat array: worker processes share its memory, a list of many small arrays would be copied page by page.
        clipped = [sequence[:max_length] for sequence in sequences]
        self.lengths: npt.NDArray[np.int64] = np.array([len(sequence) for sequence in clipped], dtype=np.int64)
        self._ends = np.cumsum(self.lengths)
        self._tokens = np.concatenate(clipped) if clipped else np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        end = self._ends[index]
        return {"input_ids": torch.tensor(self._tokens[end - self.lengths[index] : end], dtype=torch.long)}


def byte_tokens(text: str, vocab_size: int = NUM_BYTES) -> npt.NDArray[np.int64]:
    """Encode a text as its UTF-8 bytes; a byte that a smaller vocabulary lacks becomes the vocabulary's last token.

    Example:
        >>> byte_tokens("aé").tolist(), byte_tokens("aé", 100).tolist(), byte_tokens("aé", 260).tolist()
        ([97, 195, 169], [97, 99, 99], [97, 195, 169])
    """
    return np.minimum(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64), vocab_size - 1)


class PadCollator:
    """Pad the samples of a micro-batch to its longest one, rounded up to `pad_to_multiple_of`.

    Returns `input_ids`, `attention_mask` and `labels`, each `(num_samples, padded_length)`; labels are -100 on padding.

    Args:
        pad_token: stands on padding.
        pad_to_multiple_of: padded lengths are multiples of it.
        attention_mask: whether batches have one. Padding is on the right, so to train a causal model none is needed: no
            real token sees a later one, and attention without a mask skips half of its work.

    Example:
        >>> batch = PadCollator()([{"input_ids": torch.tensor([5, 6, 7])}, {"input_ids": torch.tensor([8])}])
        >>> batch["labels"].tolist()
        [[5, 6, 7], [8, -100, -100]]
    """

    def __init__(self, pad_token: int = 0, pad_to_multiple_of: int = 1, attention_mask: bool = True) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {pad_to_multiple_of}")
        self.pad_token = pad_token
        self.pad_to_multiple_of = pad_to_multiple_of
        self.attention_mask = attention_mask

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """Collate at least one sample."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        shape = (len(samples), -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of)
        batch = {
            "input_ids": torch.full(shape, self.pad_token, dtype=torch.long),
            "labels": torch.full(shape, IGNORED_LABEL, dtype=torch.long),
        }
        for row, sample in enumerate(samples):
            tokens = sample["input_ids"]
            batch["input_ids"][row, : len(tokens)] = tokens
            batch["labels"][row, : len(tokens)] = tokens
        if self.attention_mask:
            batch["attention_mask"] = (batch["labels"] != IGNORED_LABEL).long()
        return batch


class FunctionsDataModule(L.LightningDataModule):
    """The functions of the installed Python standard library, for causal language modelling.

    Every `val_every`-th function is held out for validation, test and prediction.

    Args:
        batch_size: samples per micro-batch.
        max_length: longer functions lose their end (in tokens).
        num_functions: use only the first so many functions; None: all, about 16,000.
        num_files: read only the first so many files.
        val_every: one of so many functions is held out.
        num_workers: worker processes per loader.
        pad_to_multiple_of: padded lengths are multiples of this.
        checkpoint: folder of a pretrained model, whose tokenizer is used. Without a tokenizer in it, and without a
            checkpoint, tokens are bytes.
        root: folder of Python files to read instead of the standard library.

    Example:
        >>> data = FunctionsDataModule(num_functions=20, val_every=10)
        >>> data.setup("fit")
        >>> len(data.train_dataset), len(data.val_dataset)
        (18, 2)
    """

    def __init__(
        self,
        batch_size: int = 8,
        max_length: int = 1024,
        num_functions: int | None = None,
        num_files: int | None = None,
        val_every: int = 50,
        num_workers: int = 0,
        pad_to_multiple_of: int = 1,
        checkpoint: str | None = None,
        root: str | None = None,
    ) -> None:
        super().__init__()
        if val_every < 2:
            raise ValueError(f"val_every must be at least 2 (every second function is held out), got {val_every}")
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.max_length = max_length
        self.num_functions = num_functions
        self.num_files = num_files
        self.val_every = val_every
        self.num_workers = num_workers
        self.checkpoint = checkpoint
        self.root = root
        self.collator = PadCollator(pad_to_multiple_of=pad_to_multiple_of)
        self.train_dataset: TokenDataset | None = None
        self.val_dataset: TokenDataset | None = None

    def setup(self, stage: str) -> None:
        """Read and encode the functions, once."""
        if self.train_dataset is not None:
            return
        functions = find_functions(self.root, num_functions=self.num_functions, num_files=self.num_files)
        sequences = encode([function.source for function in functions], self.checkpoint)
        is_held_out = [index % self.val_every == self.val_every - 1 for index in range(len(sequences))]
        kept, held_out = (
            [s for s, out in zip(sequences, is_held_out, strict=True) if out is part] for part in (False, True)
        )
        self.train_dataset = TokenDataset(kept, self.max_length)
        self.val_dataset = TokenDataset(held_out, self.max_length)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Shuffled batches of `batch_size`."""
        return self._loader(self.train_dataset, shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """The held-out functions in order."""
        return self._loader(self.val_dataset, shuffle=False)

    def test_dataloader(self) -> DataLoader[Sample]:
        """The held-out functions in order."""
        return self._loader(self.val_dataset, shuffle=False)

    def predict_dataloader(self) -> DataLoader[Sample]:
        """The held-out functions in order."""
        return self._loader(self.val_dataset, shuffle=False)

    def _loader(self, dataset: TokenDataset | None, shuffle: bool) -> DataLoader[Sample]:
        assert dataset is not None, "setup() has not run"
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=self.collator,
            persistent_workers=self.num_workers > 0,
        )


def encode(texts: Sequence[str], checkpoint: str | None = None) -> list[npt.NDArray[np.int64]]:
    """Token ids of each text: by the checkpoint's tokenizer if the folder has one, else bytes within its vocabulary."""
    if checkpoint is None:
        return [byte_tokens(text) for text in texts]
    if not Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint must be a folder with a saved transformers model, found none at {checkpoint!r}")
    from transformers import AutoConfig, AutoTokenizer

    if not any((Path(checkpoint) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        vocab_size: int = AutoConfig.from_pretrained(checkpoint).vocab_size
        return [byte_tokens(text, vocab_size) for text in texts]
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    return [np.array(ids, dtype=np.int64) for ids in tokenizer(list(texts))["input_ids"]]
