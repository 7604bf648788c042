# SPDX-License-Identifier: Apache-2.0
#
# Completion of vckpt for fish. The program says what to offer ("vckpt complete"); fish quotes what it inserts. Where it
# says nothing, fish completes file names.

function __vckpt_offered
    set -l words (commandline -opc)
    set -l found (command $words[1] complete --shell fish $words (commandline -ct | string unescape) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end

complete -c vckpt -f -a '(__vckpt_offered)'
