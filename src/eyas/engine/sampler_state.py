"""Sampling parameters of all request slots, on the device, and which work a batch needs.

Only parameters live here. What was generated so far is read from the engine's history at every step, so a
request that was preempted and resumed needs nothing but its row set again.
"""

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core.errors import RequestError
from eyas.core.sampling import SamplingParams

MAX_LOGIT_BIAS = 1024
"""Entries of logit_bias that a request may have."""
MAX_STOP_IDS = 128
"""Stop token ids (end-of-text ids included) that a request may have."""


class Needs(enum.IntFlag):
    """What a batch asks of the sampler, known on the host; 0 is an argmax and nothing else.

    The needs of a batch are the union over its requests. Each value may have its own CUDA graph: the
    functions of engine/sampler.py have no other branch.
    """

    GREEDY = 0
    SAMPLE = 1
    """Some request has temperature > 0."""
    FILTER = 2
    """Some sampling request has top-k, top-p or min-p (one sort of every row)."""
    SHAPE = 4
    """Some request has penalties, logit bias or min-tokens."""


def needs_of(params: SamplingParams) -> Needs:
    """Return what one request needs."""
    needs = Needs.GREEDY
    if not params.greedy:
        needs |= Needs.SAMPLE
        # The argmax survives every filter, so greedy requests need none.
        if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
            needs |= Needs.FILTER
    if (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.logit_bias
        or params.min_tokens > 0
    ):
        needs |= Needs.SHAPE
    return needs


def wrap_seed(seed: int) -> int:
    """Bring any integer into the range of int64, modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63


def stop_ids_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Token ids that end the request, sorted: its own and, unless ignore_eos, the end-of-text ids."""
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})


def check_params(params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
    """Raise RequestError, naming the field, where a request does not fit this vocabulary."""
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids: {token_id} is outside the vocabulary; ids run from 0 to {vocab_size - 1}"
            )
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias: token id {token_id} is outside the vocabulary; "
                f"ids run from 0 to {vocab_size - 1}"
            )
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(f"logit_bias[{token_id}]={bias} must be a finite number or -inf")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are supported"
        )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise RequestError(f"logprobs={params.logprobs}, but the vocabulary has {vocab_size} tokens")
    num_stops = len(stop_ids_of(params, eos_token_ids))
    if num_stops > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids and the end-of-text ids are {num_stops} together; "
            f"at most {MAX_STOP_IDS} are supported"
        )


class SamplingState:
    """One row of parameters per request slot, and a last row for padding; all tensors keep their address.

    Rows 0 .. S - 1 belong to requests; a cleared row, and row S always, is greedy without any processor.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        rows = num_slots + 1
        self.floats = torch.empty(rows, 6, dtype=torch.float32, device=device)
        self.ints = torch.empty(rows, 4, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)
        self.stop_ids = torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self._listed: set[int] = set()
        """Slots whose bias or stop lists are not empty."""
        for slot in range(rows):
            self.clear_row(slot)

    @property
    def temperature(self) -> Tensor:
        """float32 [S + 1]; 0 is greedy."""
        return self.floats[:, 0]

    @property
    def top_p(self) -> Tensor:
        """float32 [S + 1]; 1 is off."""
        return self.floats[:, 1]

    @property
    def min_p(self) -> Tensor:
        """float32 [S + 1]; 0 is off."""
        return self.floats[:, 2]

    @property
    def repetition_penalty(self) -> Tensor:
        """float32 [S + 1]; 1 is off."""
        return self.floats[:, 3]

    @property
    def presence_penalty(self) -> Tensor:
        """float32 [S + 1]."""
        return self.floats[:, 4]

    @property
    def frequency_penalty(self) -> Tensor:
        """float32 [S + 1]."""
        return self.floats[:, 5]

    @property
    def top_k(self) -> Tensor:
        """int64 [S + 1], 1 .. V; V is off."""
        return self.ints[:, 0]

    @property
    def seeds(self) -> Tensor:
        """int64 [S + 1]."""
        return self.ints[:, 1]

    @property
    def min_tokens(self) -> Tensor:
        """int64 [S + 1]."""
        return self.ints[:, 2]

    @property
    def num_prompt_tokens(self) -> Tensor:
        """int64 [S + 1]; positions from here on are output."""
        return self.ints[:, 3]

    def set_row(self, slot: int, params: SamplingParams, *, num_prompt_tokens: int, seed: int) -> None:
        """Give a slot to a request.

        Args:
            slot: 0 .. S - 1.
            params: checked by check_params already.
            num_prompt_tokens: length of the request's own prompt; also after a preemption, when its
                output is prefilled again, this stays the length of the prompt alone.
            seed: any integer; where the request has none the engine draws one and keeps it.
        """
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._write(
            slot,
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ],
            [top_k, wrap_seed(seed), params.min_tokens, num_prompt_tokens],
        )
        stops = stop_ids_of(params, self.eos_token_ids) if params.min_tokens else []
        self._write_lists(slot, params.logit_bias, stops)

    def clear_row(self, slot: int) -> None:
        """Make a row greedy, without any processor."""
        self._write(slot, [0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [self.vocab_size, 0, 0, 0])
        self._write_lists(slot, {}, [])

    def _write(self, slot: int, floats: list[float], ints: list[int]) -> None:
        _put(self.floats[slot], floats)
        _put(self.ints[slot], ints)

    def _write_lists(self, slot: int, bias: dict[int, float], stops: list[int]) -> None:
        if slot in self._listed:
            self.bias_ids[slot] = 0
            self.bias_values[slot] = 0.0
            self.stop_ids[slot] = -1
            self._listed.discard(slot)
        if bias:
            _put(self.bias_ids[slot, : len(bias)], list(bias))
            _put(self.bias_values[slot, : len(bias)], list(bias.values()))
        if stops:
            _put(self.stop_ids[slot, : len(stops)], stops)
        if bias or stops:
            self._listed.add(slot)


def _put(row: Tensor, values: Sequence[float]) -> None:
    """Copy numbers of the host into a row; on CUDA nothing waits for the step that is running."""
    host = torch.tensor(values, dtype=row.dtype, pin_memory=row.is_cuda)
    row.copy_(host, non_blocking=True)
