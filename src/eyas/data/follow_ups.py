"""The user's next turn, written by the target: its chat template is opened where that turn's text begins."""

from collections.abc import Iterator
from dataclasses import replace

from eyas.core.errors import DataError
from eyas.core.sampling import SamplingParams
from eyas.data.regenerate_dialog import Dialog, Generate
from eyas.data.template import ChatTemplate
from eyas.data.written import UserTexts


class FollowUpWriter:
    """Writes through a generator of token ids; DataError at once for a template that takes no more turns."""

    def __init__(self, template: ChatTemplate, generate: Generate) -> None:
        self.template, self.generate = template, generate
        self.texts = UserTexts(template)
        # A template that rewrites earlier turns is found here, not after the first thousand answers.
        first, following = {"role": "user", "content": "a"}, {"role": "user", "content": "c"}
        template.user_follow_up_ids([first], "b", ended=True)
        template.follow_up_ids([first], "b", following, ended=True)

    def opening(self, dialog: Dialog) -> list[int]:
        """Ids up to where the user's next text begins: behind the exact ids, where the dialog has them."""
        if not dialog.ids:
            return self.template.user_ids(dialog.messages)
        *history, answer = dialog.messages
        ended = dialog.ids[-1] in self.template.end_ids
        return dialog.ids + self.template.user_follow_up_ids(history, answer["content"], ended=ended)

    def write(
        self, dialogs: list[Dialog], params: list[SamplingParams], max_prompt_tokens: int
    ) -> Iterator[tuple[int, str, int]]:
        """Yield (index, text, sampled tokens); the text is empty where no usable one came."""
        asked, prompts, settings = [], [], []
        for index, (dialog, param) in enumerate(zip(dialogs, params, strict=True)):
            try:
                ids = self.opening(dialog)
            except DataError:  # an answer that the template does not show as it is
                ids = []
            if not ids or len(ids) > max_prompt_tokens:
                yield index, "", 0
                continue
            asked.append(index)
            prompts.append(ids)
            settings.append(replace(param, stop_token_ids=(self.texts.end_id,)))
        for place, ids, reason in self.generate(prompts, settings):
            written = self.texts.read(ids, reason)
            yield asked[place], "" if written.fault else written.text, len(ids)
