"""A stack of LSTM layers over tokens (Hochreiter & Schmidhuber, 1997), with what it reads added to each."""

from __future__ import annotations

from torch import Tensor, nn


class LstmLayer(nn.Module):
    """An LSTM and dropout, added to the input: N, T, D to the same."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.lstm(x)[0])


class LstmStack(nn.Module):
    """A language model. Input N, T token numbers; output N, T, vocabulary."""

    def __init__(self, vocabulary: int = 2000, width: int = 256, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(LstmLayer(width, dropout) for _ in range(depth)))
        self.predict = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.predict(self.layers(self.tokens(tokens)))
