"""A tokenizer of 64 characters, with a chat template, for tiny targets."""

LETTERS = "\x00 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class FakeTokenizer:
    chat_template = "yes"
    eos_token_id = 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [max(LETTERS.find(c), 1) for c in text]}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"{m['role'][0].upper()}{m['content']}" for m in messages) + "A"

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(LETTERS[i] for i in ids if i or not skip_special_tokens)
