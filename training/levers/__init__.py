"""How levers are applied: one file a lever, with the lever's name in the catalogue (service/levers)."""
