"""Independent, slow drafting: no cache, no batch, no shared layers; everything again for every guess.

Float64 matrices taken from the state dict by name, attention with a dense causal mask written out head by
head, RoPE by complex multiplication. A request is its committed tokens x[0..m] and features f[0..m-1].
"""

import torch


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, theta):
    """Rotate x [n, dh] at positions [n]: element i and i + dh/2 are one complex number."""
    half = x.shape[1] // 2
    number = torch.complex(x[:, :half], x[:, half:])
    freq = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None] * freq
    turned = number * torch.complex(angle.cos(), angle.sin())
    return torch.cat((turned.real, turned.imag), dim=1)


class NaiveHead:
    def __init__(self, model):
        self.config = model.config
        self.w = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
        self.table = model.embed_weight.detach().double()

    def norm(self, x, name):
        return rms(x, self.w[name + ".weight"], self.config.rms_norm_eps)

    def fuse(self, features):
        features, config = features.double(), self.config
        if config.norm_before_fc:
            features = self.norm(features, "input_norm")
        if config.fc_norm:
            size = config.target_hidden_size
            parts = [features[..., i * size : (i + 1) * size] for i in range(len(config.aux_layers))]
            features = torch.cat([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)], dim=-1)
        return features @ self.w["fc.weight"].T

    def layers(self, e, h, positions):
        """Rows e, h [n, D] in causal order -> (normed, feedback) [n, D]."""
        c = self.config
        n = e.shape[0]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        for i in range(c.num_layers):
            name = f"layers.{i}."
            residual = h
            if i == 0:
                hidden = self.norm(h, name + "hidden_norm")
                residual = hidden if c.norm_before_residual else h
                u = torch.cat((self.norm(e, name + "input_layernorm"), hidden), dim=1)
            else:
                u = self.norm(h, name + "input_layernorm")
            qkv = u @ self.w[name + "self_attn.qkv_proj.weight"].T
            if c.attention_bias:
                qkv = qkv + self.w[name + "self_attn.qkv_proj.bias"]
            heads = qkv.reshape(n, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            out = []
            for head in range(c.num_heads):
                group = head // (c.num_heads // c.num_kv_heads)
                q, k = heads[:, head], heads[:, c.num_heads + group]
                v = heads[:, c.num_heads + c.num_kv_heads + group]
                if c.qk_norm:
                    q = self.norm(q, name + "self_attn.q_norm")
                    k = self.norm(k, name + "self_attn.k_norm")
                q, k = rope(q, positions, c.rope.theta), rope(k, positions, c.rope.theta)
                scores = (q @ k.T / c.head_dim**0.5).masked_fill(~causal, -torch.inf)
                out.append(scores.softmax(-1) @ v)
            residual = residual + torch.cat(out, dim=1) @ self.w[name + "self_attn.o_proj.weight"].T
            x = self.norm(residual, name + "post_attention_layernorm")
            gate, up = (x @ self.w[name + "mlp.gate_up_proj.weight"].T).split(c.intermediate_size, dim=1)
            act = gate * torch.sigmoid(gate) * up
            h = residual + act @ self.w[name + "mlp.down_proj.weight"].T
        normed = self.norm(h, "norm")
        return normed, normed if c.norm_output else h

    def logits(self, normed):
        return normed @ self.w["lm_head.weight"].T

    def corrected(self, normed, target_ids, forced):
        """Rows [K, D] one after the other, each with the token chosen before it, as the formulas stand."""
        w, guesses, out = self.w, [], []
        for depth, row in enumerate(normed.unbind()):
            heard = row
            if depth and self.config.markov_form == "hidden":
                masked = guesses[-1] == self.config.mask_token_id
                before = w["mask_embedding"] if masked else self.table[guesses[-1]]
                inner = w["markov.hidden.weight"] @ row + w["markov.hidden.bias"]
                inner = inner + w["markov.token.weight"] @ before
                heard = row + w["markov.up.weight"] @ (inner * torch.sigmoid(inner))
            logits = self.logits(heard)
            if depth and self.config.markov_form == "tables":
                place = target_ids.tolist().index(guesses[-1])
                logits = logits + w["markov.out"] @ w["markov.table"][place]
            guesses.append(forced[depth] if forced else int(target_ids[logits.argmax()]))
            out.append(logits)
        return guesses, torch.stack(out)

    def masked(self, extra):
        """Hidden states [extra, D] of the mask rows, one after the other."""
        rows = []
        for depth in range(1, extra + 1):
            hidden = self.w["mask_hidden"]
            if self.config.encoded_depths:
                hidden = hidden + self.w["depth_encoding"][min(depth, self.config.encoded_depths) - 1]
            rows.append(self.fuse(hidden))
        return torch.stack(rows) if rows else torch.zeros(0, self.config.hidden_size, dtype=torch.float64)

    def draft(self, tokens, features, num_draft_tokens, target_ids, forced=None):
        """Committed tokens x[0..m], features [m, A*Dt] -> (guesses [K], logits [K, Vd]).

        With `forced` [K] those tokens are fed back in place of the argmaxes.
        """
        known = len(tokens) - 1
        e, h = self.table[torch.tensor(tokens[1:])], self.fuse(features)
        if self.config.kind == "peagle":
            extra = num_draft_tokens - 1
            e = torch.cat((e, self.w["mask_embedding"].expand(extra, -1)))
            h = torch.cat((h, self.masked(extra)))
            normed, _ = self.layers(e, h, torch.arange(known + extra))
            if self.config.markov_rank:
                return self.corrected(normed[known - 1 :], target_ids, forced)
            logits = self.logits(normed[known - 1 :])
            return target_ids[logits.argmax(-1)].tolist(), logits
        guesses, rows = [], []
        for depth in range(num_draft_tokens):
            normed, feedback = self.layers(e, h, torch.arange(e.shape[0]))
            rows.append(self.logits(normed[-1]))
            guesses.append(forced[depth] if forced else int(target_ids[rows[-1].argmax()]))
            e, h = torch.cat((e, self.table[guesses[-1]][None])), torch.cat((h, feedback[-1:]))
        return guesses, torch.stack(rows)
