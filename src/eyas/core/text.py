"""Text that can be encoded."""


def is_unicode(text: str) -> bool:
    r"""Whether `text` can be written as UTF-8.

    JSON escapes and undecodable command lines can leave half of a surrogate pair in a str, which tokenizers
    refuse without saying why: is_unicode("\ud83d") is False, is_unicode("\N{SLIGHTLY SMILING FACE}") True.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
