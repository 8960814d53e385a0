"""Records the calls of operators in a program that was not written for it: `ssdprof record`.

    place.py, places.py     which functions of which libraries compute an operator
    places.toml             the table of them; `signature.py` explains its names
    delta_rule.py, selective_scan.py, states.py
                            how a call of one is read as the operator's inputs and output

Imports no torch: the program imports it, or does not.
"""
