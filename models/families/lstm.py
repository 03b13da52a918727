"""The text networks of FedHeNN (Makhija et al., 2022): frozen embedding, LSTM of one or two layers, two dense.

The paper's embedding is GloVe, which cannot be shipped. Here it is random, the same for every client, and frozen: it is
neither trained nor sent, and does not count as parameters (221,472 and 353,568 at 2 classes, as in the paper).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fleetbed.models.base import Family, InputSpec, Net, Options
from fleetbed.profiles.experiment import Width

LAYERS = {"lstm1": 1, "lstm2": 2}
EMBEDDING_SEED = 300


class LstmOptions(Options, frozen=True, kw_only=True):
    """The widths of the embedding and of the hidden state, and of the dense layer between it and the last."""

    embedding: Width = 300
    hidden: Width = 128
    dense: Width = 10


class Lstm(Net):
    """The features are the last hidden state of the top layer."""

    extractor_parts = frozenset({"embedding"})
    classifier_parts = frozenset({"dense", "fc"})
    embedding: Tensor

    def __init__(self, layers: int, options: LstmOptions, vocabulary: int, classes: int) -> None:
        super().__init__()
        # not persistent: a constant need not travel with the weights
        self.register_buffer("embedding", torch.empty(vocabulary, options.embedding), persistent=False)
        self.lstm = nn.LSTM(options.embedding, options.hidden, layers, batch_first=True)
        self.dense = nn.Linear(options.hidden, options.dense)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(options.dense, classes)

    def fill_constants(self) -> None:
        self.embedding.normal_(generator=torch.Generator().manual_seed(EMBEDDING_SEED))

    def extract(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.embedding)

    def intermediate(self, s: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(s)
        last: Tensor = hidden[-1]
        return last

    def classify(self, f: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.relu(self.dense(f)))
        return logits

    def stages(self, x: Tensor) -> dict[str, Tensor]:
        words = self.extract(x)
        return {"embedding": words, "lstm": self.intermediate(words)}


class LstmFamily(Family):
    """The layer of the smaller network is the lower layer of the larger one."""

    name = "lstm"
    shared = True
    reads = "text"
    options_type = LstmOptions
    options: LstmOptions
    variants = tuple(LAYERS)

    def make(self, variant: str, spec: InputSpec) -> Net:
        return Lstm(LAYERS[variant], self.options, spec.vocabulary, spec.outputs)
