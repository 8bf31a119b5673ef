"""The pair algorithm written as one plain walk over one document, to compare statistics with.

Follows the description P2-P6 of the original's behaviour: nothing is vectorised, and each step is
one statement. The random document is drawn among the others, as bertkit promises.
"""

from __future__ import annotations

import random


def pairs_of_document(
    documents: list[list[list[int]]], index: int, max_length: int, rng: random.Random
) -> list[tuple[list[int], list[int], bool]]:
    """(A, B, is_random) for each example of a document of tokenised sentences."""
    max_length = max_length - 3
    target = max_length if rng.random() >= 0.1 else rng.randint(2, max_length)
    document = documents[index]
    result = []
    chunk: list[list[int]] = []
    place = 0
    while place < len(document):
        chunk.append(document[place])
        if place == len(document) - 1 or sum(map(len, chunk)) >= target:
            a_end = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            a = [token for sentence in chunk[:a_end] for token in sentence]
            is_random = len(chunk) == 1 or rng.random() < 0.5
            b: list[int] = []
            if is_random:
                other = rng.choice([i for i in range(len(documents)) if i != index])
                start = rng.randint(0, len(documents[other]) - 1)
                for sentence in documents[other][start:]:
                    b += sentence
                    if len(b) >= target - len(a):
                        break
                place -= len(chunk) - a_end
            else:
                b = [token for sentence in chunk[a_end:] for token in sentence]
            result.append((*truncate(a, b, max_length, rng), is_random))
            chunk = []
        place += 1
    return result


def truncate(
    a: list[int], b: list[int], max_length: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """One token at a time from the longer, B on ties, front or back at random."""
    a, b = list(a), list(b)
    while len(a) + len(b) > max_length:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if rng.random() < 0.5 else -1)
    return a, b
