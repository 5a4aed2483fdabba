"""A GPT that computes its loss, which benchmarks share."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a perceptron, each with layer normalisation before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.before(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Gpt(nn.Module):
    """A decoder that returns its loss, and the logits."""

    def __init__(self, width: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        later = F.pad(words, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), later.flatten(), ignore_index=-100)
        return loss, logits
