"""The fence: every private name of torch and transformers that shardwise touches is in this room.

A private name is one that its library may change in any release: a module or an attribute with a
leading underscore, an operator of FSDP2's own, a function that no documentation names. Each module
here holds the names of one subject, says why using them is right, and has a test for each of its
assumptions in tests/unit/internals, which runs on every supported release.

`parts` lists the uses that the public API can do without. They are off where the environment
variable SHARDWISE_PUBLIC_ONLY is set, on a release that was not tested, and where an assumption
does not hold; then a run takes the public path and says so.
"""
