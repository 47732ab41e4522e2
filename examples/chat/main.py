"""A conversation with the model's own chat template; each turn reuses the state of the turns before."""

from inferlet import chat, model, sample, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet

QUESTIONS = ["What is the capital of France?", "And of Italy?"]


class Conversation:
    """The messages so far, and a working set that holds the tokens of `self.held`."""

    def __init__(self, system: str | None) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.memory = WorkingSet()
        self.held: list[int] = []

    async def ask(self, question: str, max_tokens: int, sampler) -> str:
        self.messages.append({"role": "user", "content": question})
        tokens = chat.render(self.messages)
        room = model.context_length() - len(tokens)
        if room < 1:
            raise ValueError(f"the conversation has {len(tokens)} tokens; the context is {model.context_length()}")

        # Only what is new is computed. A template may render old turns differently, so the common start is looked for.
        known = 0
        while known < min(len(self.held), len(tokens) - 1) and self.held[known] == tokens[known]:
            known += 1
        self.memory.truncate(known)

        text, stop, answer, count = model.TextStream(), set(chat.stop_tokens()), "", 0
        async with Pipeline() as pipe:
            fwd = ForwardPass()
            fwd.embed(tokens[known:])
            fwd.state([self.memory], StateGeometry.folding())
            out = fwd.epilogue(sampler)
            first = pipe.submit(fwd)
            fwd.embed(out)
            ahead = pipe.run_ahead(fwd, min(max_tokens, room) - 1, depth=2)
            token = await first
            while token is not None and token not in stop:
                tokens.append(token)
                count += 1
                piece = text.push(token)
                answer += piece
                session.send(piece)
                token = await anext(ahead, None)
        last = text.finish()
        session.send(last + "\n")
        # What ran ahead of the stop token is cut off again; the answer's last token may not have been embedded yet.
        self.memory.truncate(min(len(tokens), len(self.memory)))
        self.held = tokens[: len(self.memory)]
        self.messages.append({"role": "assistant", "content": answer + last})
        return answer + last


async def main(input: dict) -> dict:
    messages = input.get("message", QUESTIONS)
    questions = [messages] if isinstance(messages, str) else messages
    sampler = sample.sampler(temperature=float(input.get("temperature", 0.0)), top_p=float(input.get("top_p", 1.0)))
    conversation = Conversation(input.get("system"))
    answers = []
    for question in questions:
        session.send(f"> {question}\n")
        answers.append(await conversation.ask(question, int(input.get("max_tokens", 64)), sampler))
    return {"answers": answers}
