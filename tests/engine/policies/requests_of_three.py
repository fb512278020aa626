"""Three requests of unequal lengths, and the tokens they are made to say."""

from __future__ import annotations

import torch


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [ids(41, 1), ids(9, 2), ids(26, 3)]
OUTPUTS = [ids(12, 4), ids(20, 5), ids(7, 6)]
