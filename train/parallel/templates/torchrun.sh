#!/bin/bash
# {{ describe }}
? if several
# Run this on each of {{ machines }} machines: {{ per_machine }}
? else
# Run this on one machine: {{ per_machine }}
? endif
# processes there.
set -euo pipefail
? if several
: "${NODE_RANK:?set NODE_RANK to 0, 1, ... {{ last }}, another one on each machine}"
: "${FIRST_MACHINE:?set FIRST_MACHINE to the name or address of the machine with NODE_RANK 0}"
? endif
{{ environment }}
exec {{ command }}
