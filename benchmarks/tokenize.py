"""Text to tokens on disk against the peers: what `tokenization.py` measures, under the name that the claims are known by.

A script's folder comes first on the import path, so a script beside this one that imports `inspect` finds this file in place
of the standard library's `tokenize`. Imported under that name it hands over the library's module and does nothing else.
"""

import importlib
import sys

if __name__ == "tokenize":
    _folder = sys.path.pop(0)
    del sys.modules["tokenize"]
    importlib.import_module("tokenize")
    sys.path.insert(0, _folder)
elif __name__ == "__main__":
    importlib.import_module("tokenization").main()
