"""The packages that pyproject.toml asks for, a line each: the program's, or those of the extra that is named."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*(project["optional-dependencies"][sys.argv[1]] if sys.argv[1:] else project["dependencies"]), sep="\n")
