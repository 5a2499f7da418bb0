#!/bin/bash
# @describe@
?several # Run this on each of @machines@ machines: @per_machine@
?!several # Run this on one machine: @per_machine@
# processes there.
set -euo pipefail
?several : "${NODE_RANK:?set NODE_RANK to 0, 1, ... @last@, another one on each machine}"
?several : "${FIRST_MACHINE:?set FIRST_MACHINE to the name or address of the machine with NODE_RANK 0}"
@environment@
exec @command@
