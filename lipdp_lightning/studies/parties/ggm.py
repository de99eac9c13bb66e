"""Provides the pseudo-random generator under function secret sharing: AES with two fixed public keys.

A node holds a 127-bit seed (its lowest bit is free: it carries a control bit). With pi and rho the AES-128 permutations
of the two keys, and H_pi(b) = pi(b) xor b (Matyas, Meyer and Oseas), the child on side d is H_pi(seed xor d), whose
lowest bit is the child's control bit, and the child's value is 64 bits of H_rho(seed xor d).

Assumption: H is a pseudo-random generator for uniform seeds, which holds in the ideal-permutation model (AES with a
known key behaves like a random permutation); it does not follow from AES being a pseudo-random permutation under a
secret key. With B seeds expanded and 2^w offline AES calls the advantage is about B 2^(w - 127). The keys depend on the
session, so work done before a session starts does not help. The gain: the keys are expanded once for all seeds, and one
call encrypts the blocks of all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lipdp_lightning.privacy.keys import derive_key

Words = npt.NDArray[np.uint64]

ONE = np.uint64(1)
SEED_MASK = np.uint64(0xFFFF_FFFF_FFFF_FFFE)
_PUBLIC = b"lipdp curves fixed keys"  # not a secret, since HMAC only names the keys here


class FixedKeyGenerator:
    """Expands arrays of seeds, rows of two 64-bit words.

    Args:
        session: the public name of the session, from which the two AES keys follow.
    """

    def __init__(self, session: bytes = b"") -> None:
        keys = derive_key(_PUBLIC, "matyas meyer oseas", session)
        self._ciphers = tuple(Cipher(algorithms.AES(key), modes.ECB()) for key in (keys[:16], keys[16:]))

    def _hash(self, cipher: int, blocks: Words) -> Words:
        size = blocks.nbytes
        out = np.empty(size + 16, dtype=np.uint8)  # update_into asks for one block more than it writes
        written = self._ciphers[cipher].encryptor().update_into(blocks.view(np.uint8).data.cast("B"), out.data)
        assert written == size
        hashed: Words = np.bitwise_xor(out[:size].view("<u8").reshape(blocks.shape), blocks)
        return hashed

    def expand(self, seeds: Words, side: Words | np.uint64, values: bool) -> tuple[Words, Words | None]:
        """Returns children (n, 2), control bit in the lowest bit, and their values (n,), on one side (0 or
        1) per seed.
        """
        blocks = np.ascontiguousarray(seeds, dtype="<u8")
        blocks = np.bitwise_and(blocks, np.array([SEED_MASK, ~np.uint64(0)]))
        blocks[:, 0] |= side
        return self._hash(0, blocks), self._hash(1, blocks)[:, 1] if values else None
