# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2207 # compgen gives one word a line, and COMPREPLY takes words
#
# Completion of vckpt for bash: commands, their options, and, where the store is known (given, or named by VCKPT_STORE), its runs and
# steps. Commands, options and the order of arguments are read from --help; the words that an option takes stand here. Where nothing fits, bash completes file names.

# _vckpt_usage PROGRAM COMMAND: the words of its positional arguments, one a line: STORE, RUN/STEP, SOURCE...
_vckpt_usage() {
	local words word
	read -ra words < <("$1" "$2" --help 2>/dev/null)
	for word in "${words[@]:3}"; do
		case $word in -* | \[-* | \[OPTION*) break ;; esac
		echo "$word"
	done
}

# _vckpt_options PROGRAM COMMAND: its usage lines and the lines of its options
_vckpt_options() {
	"$1" "$2" --help 2>/dev/null | sed -n -e '1,/^$/p' -e '/^  -/p'
}

# _vckpt_takes_value PROGRAM COMMAND OPTION: "  --set KEY=VALUE  ..." does, "  --replace  ..." does not
_vckpt_takes_value() {
	[[ $3 == -* ]] && "$1" "$2" --help 2>/dev/null | grep -qE -- "^  ([^ ]+, )?$3 [^ -]"
}

# _vckpt_values COMMAND OPTION: the words that an option takes, where they are known
_vckpt_values() {
	local untyped="bf16 f8_e4m3fn f8_e5m2 f8_e4m3fnuz f8_e5m2fnuz f8_e8m0fnu f4_e2m1fn_x2"
	case "$1 $2" in
	*" --color") echo "auto always never" ;;
	"export --format") echo "safetensors npy npy,safetensors" ;;
	"cat --layouts" | "layout --check") echo "llama mixtral deepseek" ;;
	"ls --sort") echo "name step time size" ;;
	"import --dtype") echo "$untyped" ;;
	*" --dtype") echo "bool u8 u16 u32 u64 i8 i16 i32 i64 f16 f32 f64 c64 c128 $untyped" ;;
	esac
}

# _vckpt_targets PROGRAM STORE WORD CURRENT: what may stand for WORD, such as RUN, RUN[/STEP] or RUN/STEP
_vckpt_targets() {
	local ends=p run=${4%%/*}               # what sed does with a run's name: print it, with a slash, or both
	if [[ $4 == */* ]]; then
		echo "$run/latest"
		"$1" ls "$2" "$run" --json 2>/dev/null | grep -oE '"step": *[0-9]+' | sed "s|.*[^0-9]|$run/|"
	else
		case $3 in RUN/STEP* | \[RUN/STEP*) ends='s|$|/|p' ;; */STEP*) ends='p; s|$|/|p' ;; esac
		"$1" ls "$2" --json 2>/dev/null | grep -oE '"run": *"[^"]+"' | sed -n "s|\"\$||; s|.*\"||; $ends"
	fi
}

_vckpt() {
	local program=${COMP_WORDS[0]} command=${COMP_WORDS[1]} current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
	local store given=() wanted i index word
	COMPREPLY=()
	if [ "$COMP_CWORD" -eq 1 ] || { [ "$COMP_CWORD" -eq 2 ] && [ "$command" = help ]; }; then
		COMPREPLY=($(compgen -W "$("$program" --help 2>/dev/null | sed -n 's/^  \([a-z]*\) .*/\1/p') help version" -- "$current"))
		return
	fi
	if [[ $current == -* ]]; then
		COMPREPLY=($(compgen -W "$(_vckpt_options "$program" "$command" | grep -oE -- '--[a-z][a-z-]*') --quiet --verbose --help" -- "$current"))
		return
	fi
	word=$(_vckpt_values "$command" "$before")
	if [ -n "$word" ]; then
		COMPREPLY=($(compgen -W "$word" -- "$current"))
		return
	fi
	if _vckpt_takes_value "$program" "$command" "$before"; then return; fi
	for ((i = 2; i < COMP_CWORD; i++)); do
		word=${COMP_WORDS[i]}
		if _vckpt_takes_value "$program" "$command" "$word"; then ((i++)); elif [[ $word != -* ]]; then given+=("$word"); fi
	done
	mapfile -t wanted < <(_vckpt_usage "$program" "$command")
	index=${#given[@]} store=${given[0]-}
	if [ "${wanted[0]-}" = STORE ] && [ -n "${VCKPT_STORE-}" ] && ! { [ -n "$store" ] && [ -e "$store/vckpt.store" ]; }; then
		store=$VCKPT_STORE index=$((index + 1))
	fi
	word=${wanted[index]-}
	if [ -z "$word" ] && [ ${#wanted[@]} -gt 0 ] && [[ ${wanted[-1]} == *... ]]; then word=${wanted[-1]}; fi
	case $word in
	RUN* | \[RUN*)
		COMPREPLY=($(compgen -W "$(_vckpt_targets "$program" "$store" "$word" "$current")" -- "$current"))
		if [ ${#COMPREPLY[@]} -eq 1 ] && [[ ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi
		;;
	MOUNTPOINT)
		if [ "$command" = umount ]; then
			COMPREPLY=($(compgen -W "$(awk '$3 == "fuse.vckpt" { print $2 }' /proc/self/mounts)" -- "$current"))
		fi
		;;
	esac
}

complete -o default -F _vckpt vckpt
