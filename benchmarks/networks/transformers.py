"""The two transformers that most others are measured by, in the published sizes and with random weights.

BERT: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", NAACL
2019 (arXiv 1810.04805). GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, the
smallest of its four. Shapes are written N, T, D: sequences, tokens of each, width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention: N, T, D to N, T, D. A causal token sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


def feed_forward(width: int, approximate: str, hidden: int | None = None) -> nn.Sequential:
    """Two linear layers, the hidden one four times as wide unless its width is given."""
    hidden = 4 * width if hidden is None else hidden
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate), nn.Linear(hidden, width))


class BertLayer(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised: N, T, D to N, T, D."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, causal=False)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward = feed_forward(width, "none")
        self.feed_forward_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Bert(nn.Module):
    """BERT's encoder and pooler. Input N, T token numbers; outputs N, T, D of the tokens and N, D of the sequence."""

    def __init__(
        self,
        vocabulary: int = 30522,
        positions: int = 512,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.kinds = nn.Embedding(2, width)  # first or second sentence
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(width, heads, dropout) for _ in range(depth))
        self.pooler = nn.Linear(width, width)
        self.apply(initialise)

    def embed(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places) + self.kinds(torch.zeros_like(tokens))
        return self.dropout(self.norm(x))

    def pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(self.pooler(x[:, 0]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.pool(x)


class GptLayer(nn.Module):
    """Attention and feed-forward on the normalised input, each added to it: N, T, D to N, T, D."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, "tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Gpt2(nn.Module):
    """GPT-2 with its language model head, which shares the token embedding. Input N, T; output N, T, vocabulary."""

    def __init__(
        self,
        vocabulary: int = 50257,
        positions: int = 1024,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GptLayer(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.apply(initialise)

    def embed(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(places))

    def predict(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.predict(x)


def initialise(module: nn.Module) -> None:
    """Weights as both papers' code draws them: normal with deviation 0.02, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
