"""The names of D4RL's datasets, and their file paths below http://rail.eecs.berkeley.edu/datasets/offline_rl."""

from __future__ import annotations

from itertools import product


def _gym_mujoco() -> dict[str, str]:
    files = {"ant-random-expert-v0": "gym_mujoco/ant_random_expert"}
    robots = ("halfcheetah", "hopper", "walker2d", "ant")
    for robot, level in product(robots, ("random", "medium", "expert", "medium-expert")):
        files[f"{robot}-{level}-v0"] = f"gym_mujoco/{robot}_{level.replace('-', '_')}"
    for robot in robots:
        files[f"{robot}-medium-replay-v0"] = f"gym_mujoco/{robot.removesuffix('2d')}_mixed"
    levels = ("random", "medium", "expert", "medium-replay", "full-replay", "medium-expert")
    for robot, level, version in product(robots, levels, ("v1", "v2")):
        files[f"{robot}-{level}-{version}"] = f"gym_mujoco_{version}/{robot}_{level.replace('-', '_')}-{version}"
    return files


def _mazes() -> dict[str, str]:
    files = {"maze2d-open-v0": "maze2d/maze2d-open-sparse", "maze2d-open-dense-v0": "maze2d/maze2d-open-dense"}
    for size, (name, file) in product(("umaze", "medium", "large"), (("", "-sparse"), ("-dense", "-dense"))):
        files[f"maze2d-{size}{name}-v0"] = f"maze2d/maze2d-{size}{file}"
        for eval_ in ("", "eval-"):
            files[f"maze2d-{eval_}{size}{name}-v1"] = f"maze2d/maze2d-{eval_}{size}{file}-v1"
    mazes = {"umaze": "False_multigoal_False", "umaze-diverse": "True_multigoal_True"}
    for size, (kind, goals) in product(("medium", "large"), (("play", False), ("diverse", True))):
        mazes[f"{size}-{kind}"] = f"True_multigoal_{goals}"
    shapes = {"umaze": "u-maze", "medium": "big-maze", "large": "hardest-maze"}  # in all versions but v1
    folders = {"v0": ("ant_maze_new", ""), "v1": ("ant_maze_v1", ""), "v2": ("ant_maze_v2", "_fixed")}
    for maze, (version, (folder, end)) in product(mazes, folders.items()):
        size = maze.partition("-")[0]
        shape = size if version == "v1" else shapes[size]
        files[f"antmaze-{maze}-{version}"] = f"{folder}/Ant_maze_{shape}_noisy_multistart_{mazes[maze]}_sparse{end}"
    goals = {"umaze": False, "umaze-diverse": False, "medium-play": True, "medium-diverse": False}
    for maze, several in {**goals, "large-play": True, "large-diverse": False}.items():
        file = f"Ant_maze_{maze.partition('-')[0]}_eval_noisy_multistart_True_multigoal_{several}_sparse"
        files[f"antmaze-eval-{maze}-v0"] = f"ant_maze_new/{file}"
    return files


def _others() -> dict[str, str]:
    files = {
        "minigrid-fourrooms-v0": "minigrid/minigrid4rooms",
        "minigrid-fourrooms-random-v0": "minigrid/minigrid4rooms_random",
    }
    for task in ("pen", "hammer", "relocate", "door"):
        files[f"{task}-human-v0"] = files[f"{task}-human-longhorizon-v0"] = f"hand_dapg/{task}-v0_demos_clipped"
        files[f"{task}-cloned-v0"] = f"hand_dapg/{task}-demos-v0-bc-combined"
        files[f"{task}-expert-v0"] = f"hand_dapg/{task}-v0_expert_clipped"
        files |= {f"{task}-{level}-v1": f"hand_dapg_v1/{task}-{level}-v1" for level in ("human", "cloned", "expert")}
    for road, (name, file) in product(("ring", "merge"), (("random", "random"), ("controller", "idm"))):
        files[f"flow-{road}-{name}-v0"] = f"flow/flow-{road}-v0-{file}"
    kitchens = {
        "complete": "mini_kitchen_microwave_kettle_light_slider",
        "partial": "kitchen_microwave_kettle_light_slider",
        "mixed": "kitchen_microwave_kettle_bottomburner_light",
    }
    files |= {f"kitchen-{name}-v0": f"kitchen/{file}-v0" for name, file in kitchens.items()}
    files |= {"carla-lane-v0": "carla/carla_lane_follow_flat-v0", "carla-town-v0": "carla/carla_town_subsamp_flat-v0"}
    files |= {"carla-town-full-v0": "carla/carla_town_flat-v0", "carla-lane-render-v0": "carla/carla_lane_follow-v0"}
    files["carla-town-render-v0"] = "carla/carla_town_flat-v0"
    levels = ("random", "medium", "expert", "medium-expert", "medium-replay")
    for robot, level in product(("halfcheetah", "hopper", "ant", "walker2d"), levels):
        files[f"bullet-{robot}-{level}-v0"] = f"bullet/bullet-{robot}_{level.replace('-', '_')}"
    for size in ("open", "umaze", "medium", "large"):
        files[f"bullet-maze2d-{size}-v0"] = f"bullet/bullet-maze2d-{size}-sparse"
    return files


ADDRESSES = {**_mazes(), **_gym_mujoco(), **_others()}
