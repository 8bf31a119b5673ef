"""The steps of an explanation: what each is called, its place in the paper, and its code.

"Paper" is Devlin et al. 2018 throughout; "Vaswani et al." is "Attention is all you need" (2017).
"""

from __future__ import annotations

from typing import NamedTuple


class Section(NamedTuple):
    """One step from text to loss."""

    title: str
    place: str
    """Where the literature has it."""
    modules: tuple[str, ...]
    """Files of bertkit, from the root of the repository."""
    meaning: str
    """One or two sentences for the reader."""


SECTIONS = {
    "normalisation": Section(
        "Normalisation",
        "paper section 3, Input/Output Representations; BasicTokenizer of google-research/bert",
        ("bertkit/tokens/normalize.py",),
        "The raw text becomes words: cleaned, lower-cased where the model is uncased, and split at "
        "white space, punctuation and ideographs.",
    ),
    "pieces": Section(
        "Pieces",
        "paper section 3, WordPiece (Wu et al. 2016)",
        ("bertkit/tokens/tokenizer.py",),
        "Each word is cut greedily: the longest beginning that is in the vocabulary is taken, then "
        "the longest of the rest, which is written with ##, and so on. If nothing fits, the whole "
        "word is [UNK].",
    ),
    "input": Section(
        "Input sequence",
        "paper section 3 and figure 2",
        ("bertkit/tokens/tokenizer.py", "bertkit/examples/packed.py"),
        "[CLS] comes first and [SEP] ends each text. Segment 0 is the first text, 1 the second. "
        "Characters count from 0 in each raw text.",
    ),
    "masks": Section(
        "Masks",
        "paper section 3.1, task 1, and appendix A.1",
        ("bertkit/examples/masking.py",),
        "In pre-training some pieces become targets: the network must say what they were, from "
        "what it is shown in their place.",
    ),
    "embeddings": Section(
        "Embeddings",
        "paper section 3, figure 2",
        ("bertkit/model/encoder.py",),
        "Each token is the sum of three learned vectors, of its piece, its position and its "
        "segment, and LayerNorm evens the sum out. Shown are lengths (Euclidean norms).",
    ),
    "attention": Section(
        "Attention",
        "paper section 3; Vaswani et al. 2017, sections 3.2.1 and 3.2.2",
        ("bertkit/model/attention.py",),
        "In every layer each head gives each token a weight for every token it sees: softmax of "
        "query times key over the square root of the head's width. The weights of a token add up "
        "to 1.",
    ),
    "layers": Section(
        "Layers",
        "paper section 3; Vaswani et al. 2017, section 3.1",
        ("bertkit/model/encoder.py",),
        "Attention, then a network of two layers, each added to its input and normalised. Entropy, "
        "in nats, says how widely a head looks: 0 at one token only, and at most the logarithm of "
        "the number of tokens.",
    ),
    "pooler": Section(
        "Pooler",
        "paper section 3, the vector C of [CLS]",
        ("bertkit/model/encoder.py",),
        "One vector for the whole input: tanh of a linear map of the last state of [CLS].",
    ),
    "mlm": Section(
        "Loss of the masked pieces",
        "paper section 3.1, task 1",
        ("bertkit/model/heads.py", "bertkit/objectives.py"),
        "At each target the network gives every piece of the vocabulary a probability; the loss is "
        "minus the logarithm of the true one's (in nats), averaged over the targets.",
    ),
    "nsp": Section(
        "Loss of the sentence pair",
        "paper section 3.1, task 2; for order, Lan et al. 2019 (ALBERT), section 3.1",
        ("bertkit/model/heads.py", "bertkit/objectives.py"),
        "From the pooled vector: does the second text really follow the first one? Both losses are "
        "shown, as only you know the answer.",
    ),
    "task": Section(
        "Fine-tuned head",
        "paper section 3.2",
        ("bertkit/model/task_heads.py", "bertkit/predict/tasks.py"),
        "What the model was tuned to say.",
    ),
}
"""Key -> section, in the order of an explanation."""
