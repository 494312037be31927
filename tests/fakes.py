"""Fake drafters, random heads and a naive decoder: what the engine's own tests measure it against."""

from dataclasses import replace
from typing import Any

import torch

from eyas.core.batch import Committed, Draft
from eyas.core.capture import default_aux_layers
from eyas.core.tree import DraftTree
from eyas.core.vocab_map import VocabMap
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.drafters.prompt_lookup.propose import PromptLookupDrafter
from eyas.drafters.small_model.propose import SmallModelDrafter
from eyas.kernels.reference.random import uniform
from eyas.nn.packed import PackedContext
from eyas.targets.base import Target
from tiny import tiny_target


@torch.no_grad()
def full_forward(target: Target, token_ids: list[int], capture: tuple[int, ...] = ()) -> Any:
    """Logits [n, V] and features [n, A * D] of a whole sequence at once, without any cache."""
    ids = torch.tensor([token_ids])
    context = PackedContext.of(torch.zeros_like(ids))
    hidden, features = target.decoder(ids, torch.arange(len(token_ids))[None], context, capture=capture)
    return target.decoder.logits(hidden)[0], None if features is None else features[0]


def naive_greedy(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    """One whole forward a token, argmax of the last row."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(full_forward(target, ids)[0][-1].argmax()))
    return ids[len(prompt) :]


class FakeDrafter:
    """Base of drafters without a model."""

    name = "fake"
    aux_layers: tuple[int, ...] = ()
    kv_layout = None

    def __init__(self, num_draft_tokens: int) -> None:
        self.tree = DraftTree.chain(num_draft_tokens)
        self.num_rounds = 0

    @property
    def num_draft_tokens(self) -> int:
        return self.tree.num_nodes - 1

    def bind(self, cache, max_visible) -> None:
        pass

    def prefill(self, committed: Committed) -> None:
        pass

    def propose(self, committed: Committed) -> Draft:
        raise NotImplementedError


class SilentDrafter(FakeDrafter):
    """Never has a proposal."""

    def propose(self, committed: Committed) -> Draft:
        return Draft(torch.full((committed.start.numel(), self.num_draft_tokens), -1))


class OracleDrafter(FakeDrafter):
    """Knows the right continuations and is right with probability `skill`, independently at each depth.

    A request that it does not know gets nonsense, so a wrong history shows as an acceptance of zero.
    """

    def __init__(
        self, num_draft_tokens: int, answers: list[list[int]], *, skill: float, vocab_size: int
    ) -> None:
        super().__init__(num_draft_tokens)
        self.answers, self.skill, self.vocab_size = answers, skill, vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, committed: Committed) -> Draft:
        tokens = torch.full((committed.start.numel(), self.num_draft_tokens), -1)
        for row in range(tokens.shape[0]):
            known = committed.history[row, : int(committed.start[row] + committed.counts[row]) + 1].tolist()
            for answer in self.answers:
                if answer[: len(known)] == known:
                    right = answer[len(known) : len(known) + self.num_draft_tokens]
                    for depth, token in enumerate(right):
                        lucky = torch.rand((), generator=self.generator) < self.skill
                        tokens[row, depth] = token if lucky else (token + 1) % self.vocab_size
        return Draft(tokens)


class FeatureSpy(OracleDrafter):
    """An oracle that compares everything it is given with a whole forward of the target.

    Rows must carry the token after their position and the target's features at it; draft rows of a request
    must continue without a gap.
    """

    def __init__(
        self, target: Target, num_draft_tokens: int, answers: list[list[int]], *, skill: float
    ) -> None:
        super().__init__(num_draft_tokens, answers, skill=skill, vocab_size=target.config.vocab_size)
        self.target = target
        self.aux_layers = default_aux_layers(target.config.num_layers)
        self.num_rows = 0

    def prefill(self, committed: Committed) -> None:
        self._check(committed)

    def propose(self, committed: Committed) -> Draft:
        self._check(committed)
        return super().propose(committed)

    def _check(self, committed: Committed) -> None:
        assert committed.features is not None
        for row in range(committed.start.numel()):
            start, count = int(committed.start[row]), int(committed.counts[row])
            if count == 0:
                continue  # padding of a prefill
            known = committed.history[row, : start + count + 1].tolist()
            # The last run of a request may reach past what is known of it.
            good = [known[: len(answer)] == answer[: len(known)] for answer in self.answers]
            assert any(good), "history is wrong"
            assert committed.tokens[row, :count].tolist() == known[start + 1 :]
            _, features = full_forward(self.target, known[:-1], self.aux_layers)
            torch.testing.assert_close(
                committed.features[row, :count], features[start:], rtol=1e-4, atol=1e-4
            )
            self.num_rows += count


def random_head(
    target: Target, kind: str, num_draft_tokens: int, *, sample: bool = False, seed: int = 0
) -> Any:
    """An EAGLE-3 or P-EAGLE drafter with random weights and a draft vocabulary of half the tokens.

    "tables" and "hidden" are P-EAGLE drafters with a correction by the token before, of rank 6; "depths" is
    one whose first two mask slots have a vector of their own.
    """
    encoded_depths = 2 if kind == "depths" else 0
    form, kind = (kind, "peagle") if kind in ("tables", "hidden", "depths") else (None, kind)
    torch.manual_seed(seed)
    vocab_size = target.config.vocab_size
    mask = vocab_size - 1 if kind == "peagle" else None
    config = HeadConfig.for_target(
        target.config, kind=kind, draft_vocab_size=vocab_size // 2, mask_token_id=mask, num_layers=1
    )
    config = replace(config, encoded_depths=encoded_depths)
    model_class, drafter_class = {
        "eagle3": (Eagle3Model, Eagle3Drafter),
        "peagle": (PEagleModel, PEagleDrafter),
    }[kind]
    model = model_class(config, target.decoder.embed_tokens.weight)
    if model.config.encoded_depths:
        torch.nn.init.normal_(model.depth_encoding)
    if form in ("tables", "hidden"):
        model.add_markov(form, 6, generator=torch.Generator().manual_seed(seed))
        for parameter in model.markov.parameters():
            torch.nn.init.normal_(parameter)
    model = model.requires_grad_(requires_grad=False)
    model = model.to(device=target.device, dtype=target.dtype)
    vocab_map = VocabMap(torch.arange(0, vocab_size, 2), vocab_size)
    return drafter_class(model, vocab_map, num_draft_tokens, sample_drafts=sample, uniform=uniform)


def small_model(target: Target, num_draft_tokens: int, *, sample: bool = False, same: bool = False) -> Any:
    """A separate small model; with `same` the target's own weights, so that it is always right."""
    vocab_size = target.config.vocab_size
    decoder = target.decoder if same else tiny_target(seed=9, num_layers=2, vocab_size=vocab_size).decoder
    decoder.to(target.device)
    return SmallModelDrafter(
        decoder,
        num_draft_tokens,
        small_vocab_size=vocab_size,
        vocab_size=vocab_size,
        device=target.device,
        sample_drafts=sample,
        uniform=uniform,
    )


def make_drafter(kind: str, target: Target, num_draft_tokens: int, answers: list[list[int]]) -> Any:
    """Every drafter that there is, by name."""
    vocab_size = target.config.vocab_size
    makers = {
        "silent": lambda: SilentDrafter(num_draft_tokens),
        "oracle": lambda: OracleDrafter(num_draft_tokens, answers, skill=0.7, vocab_size=vocab_size),
        "perfect": lambda: OracleDrafter(num_draft_tokens, answers, skill=1.0, vocab_size=vocab_size),
        "wrong": lambda: OracleDrafter(num_draft_tokens, answers, skill=0.0, vocab_size=vocab_size),
        "spy": lambda: FeatureSpy(target, num_draft_tokens, answers, skill=0.7),
        "prompt_lookup": lambda: PromptLookupDrafter(num_draft_tokens),
        "eagle3": lambda: random_head(target, "eagle3", num_draft_tokens),
        "peagle": lambda: random_head(target, "peagle", num_draft_tokens),
        "tables": lambda: random_head(target, "tables", num_draft_tokens),
        "hidden": lambda: random_head(target, "hidden", num_draft_tokens),
        "small_model": lambda: small_model(target, num_draft_tokens),
        "self": lambda: small_model(target, num_draft_tokens, same=True),
    }
    return makers[kind]()


class PieceTokenizer:
    """A byte-level tokenizer of 64 tokens: pieces of one to three bytes, some of them parts of a character.

    Ids 0 (end of text) and 1 are special. Ids 2 .. 5 are the four bytes of an emoji, 6 and 7 of an e acute;
    the rest are lower-case letters and pairs with blanks.
    """

    eos_token_id = 0
    chat_template = "yes"
    special = (b"<eos>", b"<bos>")

    def __init__(self) -> None:
        letters = [bytes([97 + i]) for i in range(26)]
        pairs = [bytes([97 + i, 98 + i]) for i in range(0, 24, 2)]
        blanks = [b" " + bytes([97 + i]) for i in range(18)]
        emoji, accent = "\N{GRINNING FACE}".encode(), "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()
        cut = [bytes([byte]) for byte in emoji + accent]
        self.pieces = [*self.special, *cut, *letters, *pairs, *blanks]
        assert len(self.pieces) == 64

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        keep = [self.pieces[i] for i in token_ids if i > 1 or not skip_special_tokens]
        return b"".join(keep).decode("utf-8", errors="replace")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [8 + ord(letter) - 97 for letter in text if letter.isalpha()]

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(message["content"] for message in messages) + "q"
