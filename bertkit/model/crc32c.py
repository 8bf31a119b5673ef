"""CRC-32C (Castagnoli; RFC 3720, appendix B.4) of large arrays, with NumPy alone.

A byte-by-byte loop takes minutes for a BERT. But the remainder is linear: that of two halves is
that of the first, pushed on by as many zero bytes as the second has, XOR that of the second. So
all 32-bit words of a block are joined in pairs, then the pairs, in a few vectorised steps.
"""

from __future__ import annotations

from functools import cache

import numpy as np

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, lowest bit first."""
BLOCK_WORDS = 1 << 18
"""Words joined at a time: 1 MiB."""
MASK_DELTA = 0xA282EAD8
"""LevelDB stores a rotated sum plus this, as sums of data that contain sums are weak."""


@cache
def zeros(doublings: int) -> np.ndarray:
    """The effect of 2^doublings zero bytes on a register, as (4, 256): one row for each byte."""
    if doublings == 0:
        low = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            low = (low >> np.uint32(1)) ^ (low & np.uint32(1)) * np.uint32(POLYNOMIAL)
        high = [np.arange(256, dtype=np.uint32) << (8 * (row - 1)) for row in (1, 2, 3)]
        return np.stack([low, *high])
    half = zeros(doublings - 1)
    return push(half, half)


def push(table: np.ndarray, register: np.ndarray) -> np.ndarray:
    """Registers after the zero bytes that `table` stands for; any shape, uint32."""
    result = table[3][register >> 24]
    for row in range(3):
        result ^= table[row][(register >> (8 * row)) & 255]
    return result


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of `data`."""
    words = -(-len(data) // 4)
    padded = np.zeros(words * 4, dtype=np.uint8)
    padded[words * 4 - len(data) :] = np.frombuffer(data, dtype=np.uint8)
    values = padded.view("<u4").astype(np.uint32, copy=False)
    # Leading zero bytes do not change a register of 0; the customary start of all ones is added
    # at the end, pushed on by the length of the data.
    first = words % BLOCK_WORDS
    register = join(values[:first])
    block = zeros(BLOCK_WORDS.bit_length() + 1)  # a block is a power of 2 words of 2^2 bytes
    for start in range(first, words, BLOCK_WORDS):
        register = push(block, register) ^ join(values[start : start + BLOCK_WORDS])
    register = push(zeros(2), register)
    ones = np.array([0xFFFFFFFF], dtype=np.uint32)
    for bit in range(len(data).bit_length()):
        if len(data) >> bit & 1:
            ones = push(zeros(bit), ones)
    return int(register[0] ^ ones[0]) ^ 0xFFFFFFFF


def join(values: np.ndarray) -> np.ndarray:
    """(1,) the words of a block as one register, before the push by the last word's own 4 bytes."""
    doublings = 2  # a word is 2^2 bytes
    while len(values) > 1:
        if len(values) % 2:
            values = np.concatenate([np.zeros(1, dtype=np.uint32), values])
        values = push(zeros(doublings), values[0::2]) ^ values[1::2]
        doublings += 1
    return values if len(values) else np.zeros(1, dtype=np.uint32)


def masked_crc32c(data: bytes | memoryview) -> int:
    """The checksum as LevelDB and TensorFlow store it."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & 0xFFFFFFFF
