"""One recipe per table or figure of the papers: `offbeat paper NAME`."""

from __future__ import annotations

from dataclasses import replace

from offbeat.config import registry
from offbeat.errors import ConfigError
from offbeat.papers import dlsgd, fedagrac, fedagrac_convex, fedbuff, heterogeneity, hlsgd, questions
from offbeat.papers.recipe import Recipe

MODULES = (dlsgd, fedagrac, fedagrac_convex, fedbuff, heterogeneity, hlsgd, questions)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for module in MODULES for recipe in sorted(module.RECIPES, key=lambda r: r.name)
}


def recipes_of(name: str) -> list[Recipe]:
    """The recipe of that name, shipped or of one's own; or `all` that ship."""
    if name == "all":
        return list(RECIPES.values())
    recipe: Recipe = registry.make("recipe", name)
    if name in RECIPES:
        return [recipe]
    problems = recipe.problems()
    if recipe.name in RECIPES:
        problems.append(f"its name is '{recipe.name}', as that of one that ships; give it another")
    if problems:
        raise ConfigError([f"recipe '{name}': {problem}" for problem in problems])
    return [replace(recipe, origin=name)]
