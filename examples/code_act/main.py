"""CodeAct: the model acts by writing Python, which runs right here in the sandbox, and sees what it printed."""

import contextlib
import io
import re
import traceback

from inferlet import generate, session

RULES = "Solve the task by writing Python between ```python and ```. You are shown what it prints. When you know the answer, write: ANSWER: ..."
TASK = "What is the sum of the squares of the numbers from 1 to 20?"


def execute(code: str, names: dict) -> str:
    """What the code prints, or the last line of its traceback."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "action.py", "exec"), names)
    except Exception as error:
        printed.write(traceback.format_exception_only(error)[-1])
    return printed.getvalue().strip()[:1000] or "(nothing was printed)"


async def main(input: dict) -> dict:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": input.get("task", TASK)}]
    names: dict = {}
    actions: list[list[str]] = []
    for _ in range(int(input.get("max_steps", 3))):
        start = input.get("begin", "") if not actions else ""  # lets a test write the first words
        text = start + await generate(messages, max_tokens=int(input.get("max_tokens", 128))).all_text()
        if found := re.search(r"ANSWER:\s*(.*)", text):
            return {"answer": found[1].strip(), "actions": actions}
        code = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
        seen = execute(code[1], names) if code else "There was no code."
        actions.append([code[1] if code else "", seen])
        session.send(f"{text}\n-> {seen}\n")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Printed: {seen}"}]
    return {"answer": None, "actions": actions}
