"""Records the calls of operators in a program that was not written for it: `ssdprof record`.

    place.py, places.py     which functions of which libraries compute an operator
    places.toml             the table of them; `places.py` explains its names
    delta_rule.py, selective_scan.py, states.py
                            how a call of one is read as the operator's inputs and output
    settings.py             the command's options, in a variable of the program's environment;
                            notes to the user
    site/, hook.py          in each Python process: wait for modules that have places
    wrapping.py             replace the functions of such a module
    recorder.py             take their calls, and hand them to a thread
    recorded_call.py        a call in main memory, as a pack of sequences
    keeper.py, verdict.py   which calls are stored; whether a call is wrong

Imports no torch before the program does.
"""
