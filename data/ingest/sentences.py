"""Sentences by rule: sentence pairs need boundaries, not grammar; a regular expression needs no download.

A sentence ends after . ! ? … (closing quotes and brackets included) before white space and what can begin a
sentence, after the full stops of scripts without spaces, and at a blank line. Known abbreviations, initials
and ellipses do not end one.
"""

import re

# A run of marks is tried once, from its beginning and whole: a megabyte of dots would take hours otherwise.
_ENDS = re.compile(
    # the next begins with a capital or an uncased letter
    r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?=\s+[\"'“‘«(\[]*[^\W\d_a-z])"
    r"|[。！？]+[”’」』）]*|(?<![।۔؟])[।۔؟]++(?=\s)"  # Chinese and Japanese; Hindi, Urdu, Arabic
    r"|(?=\n[ \t]*\n)"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Mt|Rev|Gen|Col|Capt|Lt|Sgt|Hon|Messrs|Esq|Jr|Sr|vs|No|Nos|Vol|Fig|Figs|Eq|cf|ca|pp|ed|e\.g|i\.e"
    r"|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.$"
)
_LONGEST_ABBREVIATION = 12


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, stripped. Joined by spaces they hold every character but white space."""
    sentences = []
    start = 0
    for found in _ENDS.finditer(text):
        end = found.end()
        if text[end - 1 : end] == "." and _ABBREVIATION.search(
            text[max(start, end - _LONGEST_ABBREVIATION) : end]
        ):
            continue
        if sentence := text[start:end].strip():
            sentences.append(sentence)
        start = end
    if last := text[start:].strip():
        sentences.append(last)
    return sentences
