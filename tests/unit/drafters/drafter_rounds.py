"""A little engine without a target: random requests, chunked prefill, rounds with random acceptance."""

import torch

from eyas.core.batch import Committed
from eyas.core.model_config import RopeConfig, TargetConfig
from eyas.core.vocab_map import VocabMap
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.peagle.model import PEagleModel
from eyas.nn.paged import allocate_cache

TARGET = TargetConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=256,
)


def head(kind, seed=0, draft_vocab_size=40, scale=0.4, **flags):
    """A random head and its vocabulary map; weights large enough that guesses wander."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "peagle":
        flags = {"mask_token_id": 63, "num_layers": 3, **flags}
    config = HeadConfig.for_target(TARGET, kind=kind, draft_vocab_size=draft_vocab_size, **flags)
    table = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    model = (PEagleModel if kind == "peagle" else Eagle3Model)(config, table)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else scale * noise)
    ids = torch.randperm(TARGET.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    return model.eval().requires_grad_(requires_grad=False), VocabMap(ids, TARGET.vocab_size)


def in_double(model):
    """The same weights in float64, rotary table included: rollouts amplify float32's rounding."""
    model.double()
    rotary = model.rotary
    exponent = torch.arange(0, rotary.head_dim, 2, dtype=torch.float64) / rotary.head_dim
    angles = torch.arange(rotary.max_position)[:, None] / rotary.rope.theta**exponent
    rotary.cos, rotary.sin = angles.cos(), angles.sin()
    return model


class Rounds:
    """Requests of random tokens and features, fed to a drafter as the engine would."""

    def __init__(
        self, drafter, lengths, *, page_size=4, max_len=96, features=True, seed=0, dtype=torch.float32
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.drafter, self.num, self.dtype = drafter, len(lengths), dtype
        self.feature_size = 3 * TARGET.hidden_size if features else 0
        self.tokens = [self.random_tokens(n) for n in lengths]
        self.features = [self.random_features(n) for n in lengths]
        """features[b][i] belongs to position i; only those before the newest token are ever used."""
        pages = max_len // page_size
        order = torch.randperm(self.num * pages, generator=self.generator) + 1
        self.page_table = order.reshape(self.num, pages).to(torch.int32)
        self.max_len, self.cache = max_len, None
        if drafter.kv_layout is not None:
            self.cache = allocate_cache(
                drafter.kv_layout, self.num * pages + 1, page_size, dtype=dtype, device="cpu"
            )
            for tensor in (*self.cache.keys, *self.cache.values):
                tensor.fill_(50.0)  # whoever reads what was never written notices
        drafter.bind(self.cache, max_len)

    def random_tokens(self, n):
        return torch.randint(0, TARGET.vocab_size - 1, (n,), generator=self.generator).tolist()

    def random_features(self, n):
        return torch.randn(n, self.feature_size, generator=self.generator, dtype=self.dtype)

    def committed(self, starts, counts, rows):
        """Rows at starts[b] .. starts[b] + counts[b] - 1, then junk that nothing may read."""
        tokens = torch.randint(0, TARGET.vocab_size, (self.num, rows), generator=self.generator)
        features = torch.full((self.num, rows, self.feature_size), torch.nan, dtype=self.dtype)
        history = torch.randint(0, TARGET.vocab_size, (self.num, self.max_len), generator=self.generator)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens[b, :count] = torch.tensor(self.tokens[b][start + 1 : start + count + 1])
            features[b, :count] = self.features[b][start : start + count]
            history[b, : start + count + 1] = torch.tensor(self.tokens[b][: start + count + 1])
        return Committed(
            tokens=tokens,
            features=features if self.feature_size else None,
            start=torch.tensor(starts),
            counts=torch.tensor(counts),
            page_table=self.page_table,
            history=history,
            max_position=self.max_len,
            temperature=torch.zeros(self.num),
            seeds=torch.arange(self.num) + 7,
        )

    def prefill(self, chunk):
        """All tokens but the last of each prompt, in chunks; requests end in different chunks."""
        done = [0] * self.num
        while True:
            counts = [
                min(chunk, len(tokens) - 1 - begin) for tokens, begin in zip(self.tokens, done, strict=True)
            ]
            if not any(counts):
                return
            self.drafter.prefill(self.committed(done, counts, chunk))
            done = [begin + count for begin, count in zip(done, counts, strict=True)]

    def round(self, accepted, num_draft_tokens):
        """Commit accepted[b] + 1 random tokens to each request and draft."""
        starts = [len(tokens) - 1 for tokens in self.tokens]
        counts = [a + 1 for a in accepted]
        for b, count in enumerate(counts):
            self.tokens[b] += self.random_tokens(count)
            self.features[b] = torch.cat((self.features[b], self.random_features(count)))
        return self.drafter.propose(self.committed(starts, counts, num_draft_tokens + 1))
