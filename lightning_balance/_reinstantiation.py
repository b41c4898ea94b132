"""How a batch sampler lets Lightning make it again (layer 1).

Under a distributed strategy Lightning replaces the sampler of a loader by a ``DistributedSampler``, and for that makes
the loader's batch sampler again from the arguments it was made with. It notes those only of objects made inside a
``train_dataloader`` hook, under the attributes below. Missing: a public way to say them for a loader that is passed to
``fit``; without it the sampler would be made from wrong arguments (PL#20272). ``tests/test_lightning_internals.py``
fails clearly when a release renames them.
"""

from __future__ import annotations

from typing import Any


def note_arguments(made: object, keywords: dict[str, Any]) -> None:
    """Note that ``type(made)(**keywords)`` makes ``made`` again; ``sampler`` may be among the keywords."""
    for name, value in {
        "__pl_saved_args": (),
        "__pl_saved_kwargs": keywords,
        "__pl_saved_arg_names": (),
        "__pl_saved_default_kwargs": {"sampler": None},
    }.items():
        object.__setattr__(made, name, value)
