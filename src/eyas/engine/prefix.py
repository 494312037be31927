"""Keys of full pages: what their contents depend on. No tensors.

The target's K and V at position j depend on tokens 0 .. j. A head's depend on one more: its row j carries
token j + 1 beside the target's features at j (core/capture). So the page of positions [s, s + P) holds what
tokens 0 .. s + P determine, P + 1 of them new with it, and that is what its key says. A prompt that goes on
differently right behind a page does not find it, and computes it anew: target and head alike, so the features
that the head's last row needs are captured on the way. Whatever is found is complete for both, and decoding
goes on from it as if it had been computed: acceptance and tokens are the same.

Keys form a chain, each a digest of the one before and of the page's own tokens; the first starts from a salt
that names target and drafter. A digest, not Python's hash: two prompts must not meet by design.

Example, P = 4, tokens 0 .. 9: page 0 has the key of tokens 0 .. 4, page 1 of tokens 0 .. 8; page 2 is not
full.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def extend_keys(keys: list[bytes], token_ids: Sequence[int], page_size: int, salt: bytes) -> None:
    """Append the keys of the pages that `token_ids`, all tokens so far, fill beyond those that have one.

    The last token has no K and V yet, but it is the one that the page before it needs.
    """
    for index in range(len(keys), (len(token_ids) - 1) // page_size):
        start = index * page_size
        own = array("q", token_ids[start : start + page_size + 1])
        above = keys[-1] if keys else blake2b(salt, digest_size=DIGEST_BYTES).digest()
        keys.append(blake2b(above + own.tobytes(), digest_size=DIGEST_BYTES).digest())
