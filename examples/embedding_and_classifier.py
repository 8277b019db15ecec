"""The last token has seen everything, the others only what came before them: embeddings and classes from a decoder.

    python examples/embedding_and_classifier.py

Which of the eight sentences of caption_language.py is it, judged by the hidden state of one token? Where only k tokens
were read, sentences that begin alike can't be told apart: k tokens allow as many right answers as there are different
beginnings. The hidden state is used in two ways: as an embedding, which a linear layer reads alone; and in a classifier
that is trained as a whole (Radford et al. 2018, section 3.2). The second reaches what is possible. The first does not:
this language model keeps what the next token takes, and once a sentence is complete that is its end, whatever it said.
So the decoders that embed texts were trained further, to do that.
"""

from __future__ import annotations

import copy

import torch
from caption_language import SENTENCES, TRAIN, as_tokens, train
from torch.nn import functional as F

from leftward import Decoder
from leftward.model.classifier import Classifier, last_hidden

TOKENS = range(1, 8)  # <bos> and six words


def best_possible(n_read: int) -> float:
    """Of eight sentences, equally often: a right one for each different beginning."""
    return len({tuple(row[:n_read]) for row in as_tokens(SENTENCES).tolist()}) / len(SENTENCES)


def accuracy(decoder: Decoder, n_read: int, *, whole: bool, steps: int = 150) -> float:
    """Of a classifier that reads the first `n_read` tokens. Where not `whole`, the decoder stays as it is."""
    torch.manual_seed(0)
    classifier = Classifier(copy.deepcopy(decoder).requires_grad_(whole), len(SENTENCES))
    trained = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    adam = torch.optim.Adam(trained, lr=0.003 if whole else 0.1, fused=True)
    tokens, classes = as_tokens(TRAIN), torch.tensor([SENTENCES.index(text) for text in TRAIN])
    for _ in range(steps):
        batch = torch.randint(len(tokens), (64,))
        loss = F.cross_entropy(classifier(tokens[batch], lengths=[n_read] * 64), classes[batch])
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.inference_mode():
        said = classifier(as_tokens(SENTENCES), lengths=[n_read] * len(SENTENCES)).argmax(dim=-1)
    return (said == torch.arange(len(SENTENCES))).float().mean().item()


@torch.inference_mode()
def distances(decoder: Decoder) -> dict[str, float]:
    """Of the embeddings of whole sentences, a mean over pairs."""
    embeddings = last_hidden(decoder, as_tokens(SENTENCES), [TOKENS[-1]] * len(SENTENCES))  # [8, D]
    apart = torch.cdist(embeddings, embeddings)
    style = torch.arange(len(SENTENCES)) // 4
    same = style[:, None] == style
    pairs = ~torch.eye(len(SENTENCES), dtype=torch.bool)
    return {"in the same style": apart[same & pairs].mean().item(), "in two styles": apart[~same].mean().item()}


def main() -> None:
    decoder = train()[0].decoder
    print("right of the eight sentences, by tokens read (<bos> and words)")
    print(f"{'':34}" + "".join(f"{n_read:8}" for n_read in TOKENS))
    for name, of in {
        "different beginnings": best_possible,
        "a linear layer on the embedding": lambda n: accuracy(decoder, n, whole=False),
        "a classifier trained as a whole": lambda n: accuracy(decoder, n, whole=True),
    }.items():
        print(f"{name:34}" + "".join(f"{of(n_read):8.1%}" for n_read in TOKENS))
    for pairs, distance in distances(decoder).items():
        print(f"mean distance of the embeddings of two sentences {pairs}: {distance:.2f}")


if __name__ == "__main__":
    main()
