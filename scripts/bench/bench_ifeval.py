"""Times the scoring of IFEval responses, strict and loose, with instructions in the proportions of the public dataset.

    python scripts/bench/bench_ifeval.py [--responses 500] [--words 350]

Responses are paragraphs of artificial English with markdown, as long as a chat model's. Two of three instructions are
violated, which is the slow case: loose evaluation then checks all eight variants. The figure is processor time of one
core, most of it in langdetect.
"""

from __future__ import annotations

import random
import time
from typing import Any

from table import Row, benchmark

from llmrl.envs.llm.ifeval import Instructions, evaluate

SENTENCES = (
    "The old harbour wakes up long before the sun reaches its walls.",
    "Nobody knows, however, who built the first of the seven towers.",
    "In 1999 the council asked Dr. Brown for a report of about 120 pages!",
    "Is there a better way to spend a quiet Sunday afternoon?",
    "*Bread and salt* are offered to every guest, e.g. at weddings.",
    "Most travellers stay for two nights, and some of them never leave.",
    "NASA engineers have praised the **clear night sky** of the valley.",
)
LESS, LEAST = "less than", "at least"

# The 834 instructions of the public file: the number of each kind, and typical arguments.
MIX: dict[str, tuple[int, dict[str, Any]]] = {
    "keywords:existence": (39, {"keywords": ["harbour", "lighthouse"]}),
    "keywords:frequency": (42, {"keyword": "the", "frequency": 8, "relation": LEAST}),
    "keywords:forbidden_words": (49, {"forbidden_words": ["tower", "bridge"]}),
    "keywords:letter_frequency": (33, {"letter": "q", "let_frequency": 4, "let_relation": LESS}),
    "language:response_language": (31, {"language": "en"}),
    "length_constraints:number_sentences": (52, {"num_sentences": 10, "relation": LESS}),
    "length_constraints:number_paragraphs": (27, {"num_paragraphs": 3}),
    "length_constraints:number_words": (52, {"num_words": 300, "relation": LEAST}),
    "length_constraints:nth_paragraph_first_word": (12, {"num_paragraphs": 4, "nth_paragraph": 2, "first_word": "the"}),
    "detectable_content:number_placeholders": (27, {"num_placeholders": 3}),
    "detectable_content:postscript": (26, {"postscript_marker": "P.S."}),
    "detectable_format:number_bullet_lists": (31, {"num_bullets": 4}),
    "detectable_format:constrained_response": (10, {}),
    "detectable_format:number_highlighted_sections": (48, {"num_highlights": 3}),
    "detectable_format:multiple_sections": (14, {"section_spliter": "Section", "num_sections": 3}),
    "detectable_format:json_format": (17, {}),
    "detectable_format:title": (37, {}),
    "combination:two_responses": (24, {}),
    "combination:repeat_prompt": (41, {"prompt_to_repeat": "Write about the harbour."}),
    "startend:end_checker": (26, {"end_phrase": "Is there anything else I can help with?"}),
    "startend:quotation": (41, {}),
    "change_case:capital_word_frequency": (25, {"capital_frequency": 3, "capital_relation": LESS}),
    "change_case:english_capital": (25, {}),
    "change_case:english_lowercase": (39, {}),
    "punctuation:no_comma": (66, {}),
}


def cases(count: int, words: int, seed: int = 0) -> list[tuple[str, Instructions]]:
    draw = random.Random(seed)
    names, weights = list(MIX), [number for number, _ in MIX.values()]
    made = []
    for number in range(count):
        chosen = draw.choices(names, weights, k=draw.choice((1, 1, 2, 3)))
        arguments = [MIX[name][1] for name in chosen]
        if number % 2 == 0:  # every other response is in the wrong language
            arguments = [{"language": "de"} if "language" in given else given for given in arguments]
        text = _response(words, draw)
        if "change_case:english_lowercase" in chosen:
            text = text.lower()
        elif "change_case:english_capital" in chosen:
            text = text.upper()
        made.append((text, Instructions.of(chosen, arguments, f"row {number + 1}")))
    return made


def _response(words: int, draw: random.Random) -> str:
    parts: list[str] = []
    while sum(part.count(" ") + 1 for part in parts) < words:
        parts.append(draw.choice(SENTENCES) + draw.choice((" ", " ", " ", "\n\n", "\n* ")))
    return "".join(parts)


def main(responses: int, words: int, repeats: int) -> list[Row]:
    evaluate("warm up", Instructions.of(["language:response_language"], [{"language": "en"}], "row 1"))
    fastest, followed = float("inf"), []
    for repeat in range(repeats):  # new texts in each repeat: detected languages are cached
        made = cases(responses, words, seed=repeat)
        start = time.process_time()
        followed = [strict for text, instructions in made for strict in evaluate(text, instructions).strict]
        fastest = min(fastest, time.process_time() - start)
    print(f"{responses} responses of {words} words, {sum(followed)}/{len(followed)} followed")
    return [Row("IFEval: scoring 500 responses, processor time", fastest * 500 / responses, 2.0, "s")]


if __name__ == "__main__":
    benchmark(main, __doc__, responses=500, words=(350, "of a response"), repeats=3)
