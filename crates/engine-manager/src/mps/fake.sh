#!/bin/sh
# Stands in for nvidia-cuda-mps-control in tests: a "daemon" is a file in its pipe directory.
#
#   FAKE_LOG       every command is appended here
#   FAKE_MODE      dead: `-d` succeeds and nothing ever answers; refuses: `-d` fails; fault: its server reports a fault
pipe=${CUDA_MPS_PIPE_DIRECTORY:?}
note() { [ -z "$FAKE_LOG" ] || echo "$*" >>"$FAKE_LOG"; }

if [ "$1" = -d ]; then
    note "start threads=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-unset} devices=${CUDA_VISIBLE_DEVICES:-unset}"
    case $FAKE_MODE in
    refuses) exit 1 ;;
    dead) echo "cannot open /dev/nvidia0" >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 0 ;;
    esac
    echo 4242 >"$pipe/control"
    exit 0
fi
if [ ! -e "$pipe/control" ]; then
    echo "Cannot find MPS control daemon process"
    exit 1
fi
while read -r command argument rest; do
    note "$command${argument:+ $argument}${rest:+ $rest}"
    case $command in
    get_default_active_thread_percentage) echo 100.0 ;;
    start_server) touch "$pipe/server" ;;
    get_server_list) [ ! -e "$pipe/server" ] || echo 77 ;;
    get_server_status) [ "$FAKE_MODE" = fault ] && echo FAULT || echo ACTIVE ;;
    get_client_list) cat "$pipe/clients" 2>/dev/null ;;
    terminate_client) ;;
    quit) rm -f "$pipe/control" "$pipe/server" ;;
    *) echo "unknown command $command"; exit 1 ;;
    esac
done
exit 0
