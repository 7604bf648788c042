# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Completion of vckpt for bash. The program says what to offer ("vckpt complete"), quoted as bash needs it.

_vckpt() {
	COMPREPLY=()
	mapfile -d '' -t COMPREPLY < <("$1" complete --shell bash "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
	if [ ${#COMPREPLY[@]} -eq 1 ] && [[ ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi
}

complete -o default -F _vckpt vckpt
