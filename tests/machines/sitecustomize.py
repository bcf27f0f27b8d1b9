"""Python imports this at its start where the folder is on PYTHONPATH: be on another machine."""

import os

from other_machines import MACHINES, VARIABLE, pretences

if VARIABLE in os.environ:
    [_machine] = [each for each in MACHINES if each.id == os.environ[VARIABLE]]
    for _place, _name, _function in pretences(_machine):
        setattr(_place, _name, _function)
