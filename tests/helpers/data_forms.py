"""Users' data in the forms in which it is found."""

from datasets import Dataset


def rows_of(*rows):
    return Dataset.from_list(list(rows), on_mixed_types="use_json")


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, /, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, CHOSEN, REJECTED = user("Why?"), assistant("Because."), assistant("No idea.")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}
CALLED = [
    user("Oslo?"),
    assistant(None, tool_calls=[call("weather", city="Oslo")]),
    {"role": "tool", "content": "sun"},
]
TALK = [*CALLED, assistant("Sunny in Oslo.")]
READ_CALLS = [CALLED[0], CALLED[1] | {"content": ""}, *TALK[2:]]

ANSWERED = {"prompt": [ASKED], "completion": [CHOSEN]}
PAIR = {"prompt": [ASKED], "chosen": [CHOSEN], "rejected": [REJECTED]}

FORMS = {
    "messages": {"messages": [ASKED, CHOSEN]},
    "prompt and completion": ANSWERED,
    "ShareGPT": {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    "Alpaca": {"instruction": "Why?", "input": "", "output": "Because."},
    "UltraFeedback": {"prompt": "Why?", "chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]},
    "orca": {"system": "", "question": "Why?", "chosen": "Because.", "rejected": "No idea."},
    "pairs without a prompt": {"chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]},
}
REASONED = assistant("Because.", reasoning_content="It has a cause.")
FORMS_OF_SOME_TEMPLATES = {
    "function calling": {"messages": TALK, "tools": [TOOL]},
    "function calling, pairs": {
        "prompt": CALLED[:1],
        "chosen": CALLED[1:2],
        "rejected": [assistant("", tool_calls=[call("weather", city="Rome")])],
        "tools": [TOOL],
    },
    "reasoning": {"prompt": [ASKED], "completion": [REASONED]},
    "reasoning, pairs": {"prompt": [ASKED], "chosen": [REASONED], "rejected": [REJECTED]},
}
"""Forms that say more than texts, which not every template renders."""
