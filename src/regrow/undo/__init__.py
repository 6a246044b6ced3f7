"""Take back one optimizer step, parameter by parameter.

    ledger = Ledger(optimizer)              # refuses here, by name, what it could not take back later
    ledger.before(); optimizer.step(); ledger.after()
    ledger.undo([param, ...])               # or ledger.clear() when the step is complete

`Rule`, `Note` and `Slice` are what an optimizer of your own needs to be `register`ed.
"""

from regrow.undo.ledger import Ledger
from regrow.undo.registry import check_supported, register, rule_for
from regrow.undo.rule import PARAM, Elementwise, Note, Rule, Slice

__all__ = ["PARAM", "Elementwise", "Ledger", "Note", "Rule", "Slice", "check_supported", "register", "rule_for"]
